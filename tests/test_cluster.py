"""The same run on several machines: joblib's Dask backend, with a shared file system."""

import pytest

distributed = pytest.importorskip("distributed", reason="needs the extra `cluster`")

import joblib  # noqa: E402

from pipeline.folder import find_folders  # noqa: E402
from pipeline.offline.extract import RunSpec, extract_all  # noqa: E402
from tests.videos import write_video  # noqa: E402


@pytest.mark.filterwarnings("ignore")
def test_a_dask_cluster_does_the_same_work(tmp_path):
    names = [f"A/{number}.avi" for number in range(6)]
    for name in names:
        write_video(tmp_path / "videos" / name, frames=4)
    (tmp_path / "videos" / "A" / "bad.avi").write_bytes(b"no video")
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with (
        distributed.LocalCluster(**options) as cluster,
        distributed.Client(cluster),
        joblib.parallel_config(backend="dask"),
    ):
        report = extract_all(
            [*names, "A/bad.avi"], tmp_path / "videos", tmp_path / "frames", run=RunSpec(jobs=2)
        )
    assert [done.task.video for done in report.made] == names
    assert [failure.video for failure in report.failures] == ["A/bad.avi"]
    assert report.num_frames == 24
    assert len(find_folders(tmp_path / "frames")) == 6
