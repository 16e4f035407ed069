"""Every command in the README does what it says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.videos import write_video

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = [
    command for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for command in block.splitlines()
]
RUN_BY_CI = {"make demo", "make test"}  # the very commands of .ci/run, which runs this test


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small UCF101: two of its classes, videos of their kind, lists in their form."""
    root = tmp_path_factory.mktemp("readme")
    splits = root / "data" / "ucf101" / "splits"
    splits.mkdir(parents=True)
    classes = ["ApplyEyeMakeup", "YoYo"]
    (splits / "classInd.txt").write_bytes(b"1 ApplyEyeMakeup\r\n2 YoYo\r\n")
    lists: dict[str, list[str]] = {"train": [], "test": []}
    for label, name in enumerate(classes, 1):
        for group in range(1, 5):
            video = f"{name}/v_{name}_g{group:02d}_c01.avi"
            write_video(root / "data" / "ucf101" / "videos" / video, frames=31)
            lists["test" if group == 1 else "train"].append(video if group == 1 else f"{video} {label}")
    for number in ("01", "02", "03"):
        for side, lines in lists.items():
            (splits / f"{side}list{number}.txt").write_bytes(
                "".join(f"{line}\r\n" for line in lines).encode()
            )
    return root


def test_ci_runs_the_commands_that_cannot_run_inside_the_tests():
    script = (ROOT / ".ci" / "run").read_text()
    assert set(COMMANDS) >= RUN_BY_CI
    for command in RUN_BY_CI:
        assert re.search(rf"(?m)^{re.escape(command)}( |$)", script)


def make(root: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    place = [f"DATA={root / 'data'}", f"MANIFESTS={root / 'manifests'}", f"PY={sys.executable}"]
    command = ["make", *words, *place, "-o", ".venv/.done"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in RUN_BY_CI])
def test_a_command_of_the_readme_works(root, command):
    first, *words = shlex.split(command)
    assert first == "make"
    if words[0] == "train":
        words.append(f"ARGS=--epochs 1 --out {root / 'run'}")  # of a test's length, not of UCF101's
    words = [word.replace("build/", f"{root}/").replace(" data/", f" {root}/data/") for word in words]
    run = make(root, words)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Traceback" not in run.stderr


def run_example(root: Path, heading: str) -> str:
    code = re.search(r"```python\n(.*?)```", README[README.index(f"## {heading}") :], re.DOTALL)[1]
    (root / "example.py").write_text(code)
    run = subprocess.run(
        [sys.executable, "example.py"],
        cwd=root,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_example_in_python_works(root):
    for words in (["frames", "DATASET=ucf101"], ["pack", "DATASET=ucf101"]):
        assert make(root, words).returncode == 0
    assert "torch.Size([6, 3, 16, 112, 112])" in run_example(root, "In your own training loop")


def test_the_example_of_several_datasets_works(root):
    for number in range(1, 5):
        write_video(root / "data" / "hmdb51" / "videos" / "ride_bike" / f"r{number}.avi", frames=31)
    for dataset in ("ucf101", "hmdb51"):
        assert make(root, ["frames", f"DATASET={dataset}"]).returncode == 0
    printed = run_example(root, "Several datasets")
    first, *_ = printed.splitlines()
    assert sorted(map(int, first.strip("[]").split(", "))) == [0] * 6 + [1] * 2
    assert re.search(r"\n  Biking +3 ", printed)


def test_every_target_is_explained():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?m)^([a-z]+):.*## ", makefile)) - {"help"}
    table = README[README.index("## Targets") :]
    missing = {target for target in targets if f"`{target}`" not in table}
    assert not missing


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").glob("*.py")), ids=lambda path: path.stem)
def test_every_script_explains_itself(path):
    if "run(main)" not in path.read_text():
        pytest.skip("a part of other scripts")
    command = [sys.executable, "-m", f"scripts.{path.stem}", "--help"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--" in run.stdout
    assert "None" not in run.stdout.splitlines()[2]
