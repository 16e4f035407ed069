"""`make tune`: real loaders, a table, a winner that `make train` takes up, and the same batches whatever."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import PipelineError, StoreError
from pipeline.measure.trials import (
    FACTORS,
    LoaderSetting,
    LoaderTrials,
    TrialStores,
    check_memory,
    loader_cost,
    loader_factors,
    loader_fallbacks,
)
from pipeline.measure.tuned import (
    ClipShape,
    Machine,
    Measured,
    Tuned,
    TunedError,
    Tuning,
    find_misfit,
    read_machine,
    read_tuned,
    tuned_path,
    write_tuned,
)
from pipeline.measure.tuner import Rule, TrialError
from pipeline.online import EpochSampler, LoaderSpec, build_loader
from pipeline.online.ram import FreeMemory, copies_in_ram, release_ram
from pipeline.training.ranks import Ranks
from scripts import run, train, tune_loader
from scripts.train_options import ClipOptions, RunOptions
from scripts.train_place import Place, Stop, share_cores
from scripts.train_tuned import with_tuned
from tests.streams import samples
from tests.training_runs import WINDOW, one_thread, write_shades

ROOT = Path(__file__).parents[1]
SMALL = ("--size-px", "16", "--frames", "4", "--batch-size", "6", "--device", "cpu")
CPU = torch.device("cpu")
LOADING = LoaderSpec(batch_size=6)
USUAL = Tuning(workers=1, threads=1, prefetch=2, readers=0, pin=False, cache="disk")
SHAPE = ClipShape(batch_size=6, frames=4, height_px=16, width_px=16)
MACHINE = Machine(cpu='Some "CPU" @ 2 GHz', cores=4, memory_bytes=16 << 30, gpu="")


def tuned_of(machine: Machine | None = None, clips: ClipShape = SHAPE, **tuning) -> Tuned:
    measured = Measured(device="cpu", clips_per_s_before=100.0, clips_per_s_after=150.5, date="2031-12-24")
    return Tuned(
        tuning=replace(USUAL, **tuning), clips=clips, measured=measured, machine=machine or read_machine()
    )


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.fixture
def root(tmp_path):
    write_shades(tmp_path)
    return tmp_path


@pytest.fixture
def _quick(monkeypatch):
    """Few and short repeats, so that time is never up."""
    monkeypatch.setattr(tune_loader, "RULE", Rule(most_rounds=3))
    monkeypatch.setattr(tune_loader, "_SHORTEST_S", 0.01)
    monkeypatch.setattr(tune_loader, "_LONGEST_S", 0.01)


def where(root: Path) -> list[str]:
    return ["--dataset", "shades", "--data", str(root), "--manifests", str(root / "manifests"), *SMALL]


def call(capsys, main, root: Path, *args: str) -> tuple[int, list[str], str]:
    """Exit status, lines on stdout, and stderr."""
    with pytest.raises(SystemExit) as end:
        run(main, [*where(root), *args])
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out.splitlines(), said.err


def call_tune(capsys, root: Path, *args: str) -> tuple[int, list[str], str]:
    return call(capsys, tune_loader.main, root, "--cache", "disk", *args)


def plain_loader(root: Path, **options):
    """The loader of `train`, without workers, and stores to read from."""
    place = Place(
        RunOptions(dataset="shades", data=root, manifests=root / "manifests", **options),
        CPU,
        Ranks(),
        LoaderSpec(batch_size=6),
        Stop(),
    )
    rows = place.read_manifest().select(split01="train")
    stores = TrialStores(root / "shades" / "frames", root / "shades" / "pack", rows)
    clips = ClipOptions(size_px=16, scale=(0.1, 1.0))
    loader = tune_loader.plain_loader(place, clips, WINDOW, rows, stores.open("disk").store)
    return loader, stores


def open_trials(root: Path, **options):
    loader, stores = plain_loader(root)
    return LoaderTrials(
        loader.dataset,
        loader.sampler,
        LoaderSpec(),
        open_store=lambda cache: stores.open(cache).store,
        repeat_s=0.01,
        **options,
    )


# No trial changes a batch.


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
def test_the_stream_is_the_same_whatever_the_default_factors_try(root):
    loader, stores = plain_loader(root)
    start = LoaderSetting(tuning=replace(USUAL, workers=2), batch_size=6)
    factors = loader_factors(FACTORS, cores=4, has_cuda=False)
    tried = [each for factor in factors for each in factor.candidates(start)]
    assert {each.batch_size for each in tried} == {6}
    assert len(tried) == 2 + 2 + 2 + 2 + 2
    try:
        digests = set()
        for setting in [start, *tried, *loader_fallbacks(start)]:
            loader.dataset.store = stores.open(setting.tuning.cache).store
            spec = setting.tuning.apply(LoaderSpec(batch_size=setting.batch_size))
            sampler = EpochSampler(loader.dataset.manifest, WINDOW, seed=0)
            digests.add("\n".join(samples(build_loader(loader.dataset, sampler, spec))))
    finally:
        stores.let_go(keep=None)
    assert len(digests) == 1


def test_settings_are_not_what_a_batch_is_made_of():
    spec = LoaderSpec(batch_size=5, drop_last=True, ranks_on_machine=2)
    tuning = Tuning(workers=3, threads=2, prefetch=4, readers=2, pin=True, cache="ram")
    applied = tuning.apply(spec)
    assert replace(applied, workers=None, threads=1, prefetch=2, readers=0, pin=None) == spec
    assert (applied.workers, applied.threads, applied.prefetch) == (3, 2, 4)
    assert (applied.readers, applied.pin) == (2, True)


# What is tried.


@given(
    cores=st.integers(1, 256),
    workers=st.integers(0, 256),
    threads=st.integers(1, 8),
    has_cuda=st.booleans(),
)
@settings(deadline=None)
def test_candidates_stay_within_the_cores_and_change_one_factor(cores, workers, threads, has_cuda):
    start = LoaderSetting(tuning=replace(USUAL, workers=workers, threads=threads), batch_size=8)
    for factor in loader_factors((*FACTORS, "batch"), cores=cores, has_cuda=has_cuda):
        candidates = factor.candidates(start)
        assert len(candidates) <= 6
        assert factor.only_shown == (factor.name == "batch")
        for candidate in candidates:
            before, after = asdict(start.tuning), asdict(candidate.tuning)
            changed = {name for name in before if before[name] != after[name]}
            allowed = {"workers", "threads"} if factor.name == "threads" else {factor.name}
            assert changed <= allowed - {"batch"}
            assert candidate.batch_size == start.batch_size or factor.name == "batch"
            if factor.name in ("workers", "threads"):
                assert (
                    1
                    <= candidate.tuning.workers * candidate.tuning.threads
                    <= max(cores, threads, workers * threads)
                )
            if factor.name == "workers":
                assert candidate.tuning.workers * threads <= max(cores, threads)
            assert candidate.tuning.pin <= has_cuda
            assert candidate.tuning.prefetch > 1


def test_one_core_leaves_nothing_to_share_out():
    start = LoaderSetting(tuning=USUAL, batch_size=8)
    found = {f.name: f.candidates(start) for f in loader_factors(FACTORS, cores=1, has_cuda=False)}
    assert [name for name, candidates in found.items() if not candidates] == ["workers", "threads", "pin"]


def test_fewer_cores_then_less_memory_are_cheaper():
    def cost(**tuning):
        return loader_cost(LoaderSetting(tuning=replace(USUAL, **tuning), batch_size=8))

    assert cost() < cost(workers=2)
    assert cost(workers=1, threads=2) < cost(workers=2)
    assert cost() < cost(prefetch=4) < cost(readers=2) < cost(workers=2)
    assert cost() < cost(pin=True)
    assert cost() == cost(cache="ram")


def test_a_factor_that_there_is_not_is_named():
    with pytest.raises(ValueError, match=r"no factor is named 'worker': there are workers, threads"):
        loader_factors(("worker",), cores=1, has_cuda=False)


def test_what_does_not_fit_into_memory_is_refused_with_the_sum():
    spec = LoaderSpec(batch_size=8, workers=4)
    check_memory(spec, 1 << 20, FreeMemory(available=1 << 30, cgroup=None, shm=0))
    with pytest.raises(
        PipelineError, match=r"104.9 MB of memory are free and 4 workers with 10 batches in flight need"
    ):
        check_memory(spec, 1 << 20, FreeMemory(available=1 << 30, cgroup=100 << 20, shm=0))


# Measuring.


def test_real_loaders_are_measured_in_turns_and_only_two_stay_open(root):
    with open_trials(root) as measure:
        settings = [
            LoaderSetting(tuning=replace(USUAL, **each), batch_size=6)
            for each in ({}, {"workers": 2}, {"workers": 0}, {"readers": 2})
        ]
        for setting in [*settings, *settings[:2]]:
            assert measure(setting) > 0
            assert len(measure._open) <= 2
        assert measure.clips_taken >= 6 * 2 * 6
        assert measure.reserve_s(5) > 0
    assert not measure._open


def test_a_stand_in_for_the_step_is_what_is_waited_for(root):
    with open_trials(root, step_s=0.02) as measure:
        rate = measure(LoaderSetting(tuning=replace(USUAL, workers=0), batch_size=6))
    assert rate < 6 / 0.02


def test_the_loader_that_is_tuned_is_left_as_it_was(root):
    loader, stores = plain_loader(root)
    before = (
        loader.sampler.state_dict(),
        loader.dataset.threads,
        loader.dataset.readers,
        loader.dataset.store,
    )
    setting = LoaderSetting(tuning=replace(USUAL, workers=0, threads=2, readers=2, cache="off"), batch_size=4)
    with LoaderTrials(
        loader.dataset,
        loader.sampler,
        LoaderSpec(),
        open_store=lambda cache: stores.open(cache).store,
        repeat_s=0.01,
    ) as measure:
        measure(setting)
    after = (
        loader.sampler.state_dict(),
        loader.dataset.threads,
        loader.dataset.readers,
        loader.dataset.store,
    )
    assert after == before


def test_a_setting_that_cannot_run_says_why(root, monkeypatch):
    setting = LoaderSetting(tuning=USUAL, batch_size=6)
    monkeypatch.setattr("pipeline.online.loader.free_bytes", lambda _: 1000)
    with open_trials(root) as measure:
        with pytest.raises(TrialError, match="batches in flight need"):
            measure(setting)
        assert measure(replace(setting, tuning=replace(USUAL, workers=0))) > 0


def test_a_worker_that_dies_is_a_setting_that_cannot_run(root):
    setting = LoaderSetting(tuning=replace(USUAL, workers=1), batch_size=6)
    with open_trials(root) as measure:
        measure(setting)
        (worker,) = measure._open[setting]._iterator._workers
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
        with pytest.raises(TrialError, match="worker"):
            measure(setting)
        assert measure(setting) > 0  # with a new one


def test_a_damaged_frame_is_no_matter_of_settings(root):
    (root / "shades" / "pack" / "frames.bin").write_bytes(
        bytes((root / "shades" / "pack" / "frames.bin").stat().st_size)
    )
    with open_trials(root) as measure, pytest.raises(StoreError, match="verify"):
        measure(LoaderSetting(tuning=replace(USUAL, workers=0), batch_size=6))


def test_a_copy_in_memory_that_lost_goes_again_and_one_that_was_there_stays(root):
    _, stores = plain_loader(root)
    pack = root / "shades" / "pack"
    try:
        stores.open("ram")
        assert copies_in_ram(pack)
        stores.let_go(keep="ram")
        assert copies_in_ram(pack)
        _, later = plain_loader(root)
        later.open("ram")
        later.let_go(keep="disk")
        assert copies_in_ram(pack)
    finally:
        stores.let_go(keep="disk")
    assert not copies_in_ram(pack)


# The command.


@pytest.mark.usefixtures("_quick")
def test_a_row_for_each_trial_the_winner_saved_and_a_verdict(root, capsys, monkeypatch):
    monkeypatch.setattr(tune_loader, "today", lambda: "2031-12-24")
    status, lines, errors = call_tune(
        capsys, root, "--workers", "2", "--factors", "workers", "prefetch", "pin"
    )
    assert (status, errors) == (0, "")
    text = "\n".join(lines)
    for expected in (
        "frames    cache=disk: pack ",
        "begin     workers 2, threads 1, prefetch 2, readers 0, pin off, cache disk, clips in a batch 6",
        "plan      up to ",
        "over after 120 s. Ctrl-C keeps what was measured",
        "note      no GPU in use: pinned memory is not tried",
    ):
        assert expected in text
    rows = [line.split()[0] for line in lines if line.startswith("  ")]
    assert rows[:2] == ["factor", "workers"]
    assert lines[-3].startswith("verdict   ")
    path = tuned_path(root / "manifests", "shades")
    assert lines[-2] == f"saved     {path}: `make train` takes it up; delete it, or give --tuned off, to undo"
    assert lines[-1].startswith("next      make ")
    outcome = json.loads((root / "manifests" / "shades.tune.json").read_text())
    assert outcome["verdict"] == lines[-3:]
    assert outcome["machine"] == asdict(read_machine())
    assert [row["factor"] for row in outcome["trials"]] == rows[1:]
    tuned = read_tuned(path)
    assert tuned is not None
    assert outcome["winner"]["tuning"] == asdict(tuned.tuning)
    assert (tuned.clips, tuned.measured.date) == (SHAPE, "2031-12-24")
    assert tuned.tuning.cache == "disk"


@pytest.mark.usefixtures("_quick")
def test_without_shared_memory_it_goes_on_without_workers(root, capsys, monkeypatch):
    monkeypatch.setattr("pipeline.online.loader.RAM_ROOT", root / "nothing")
    monkeypatch.setattr(tune_loader, "RAM_ROOT", root / "nothing")
    status, lines, _ = call_tune(capsys, root, "--factors", "prefetch")
    assert status == 0
    text = "\n".join(lines)
    assert "cannot run: " in text
    assert "taken: the first that runs" in text
    assert f"note      no {root / 'nothing'}: workers have nowhere to leave batches" in text
    assert "verdict   the usual settings cannot run here (" in text
    assert read_tuned(tuned_path(root / "manifests", "shades")).tuning.workers == 0


@pytest.mark.usefixtures("_quick")
def test_other_batch_sizes_are_shown_and_never_saved(root, capsys):
    status, lines, _ = call_tune(capsys, root, "--factors", "batch", "--workers", "0")
    assert status == 0
    rows = [line for line in lines if line.startswith("  batch")]
    assert [row.split()[1:3] for row in rows] == [["batch", "3"], ["batch", "12"]]
    assert all(row.endswith("; only shown, since it changes what a batch holds") for row in rows)
    assert read_tuned(tuned_path(root / "manifests", "shades")).clips.batch_size == 6


@pytest.mark.usefixtures("_quick")
def test_a_pack_that_is_missing_is_a_reason_and_not_the_end(root, capsys):
    (root / "shades" / "pack" / "pack.json").unlink()
    options = ("--factors", "cache", "--workers", "0")
    status, lines, _ = call(capsys, tune_loader.main, root, "--cache", "off", *options)
    assert status == 0
    rows = [line for line in lines if line.startswith("  cache")]
    assert [row.split()[2] for row in rows] == ["disk", "ram"]
    assert all("cannot run: " in row for row in rows)


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (("--dataset", "nothing"), "nothing.parquet"),
        (("--split", "split09"), "split09"),
        (("--model", "smal"), "did you mean small?"),
        (("--budget-s", "0"), "budget_s must be > 0"),
        (("--factors", "wrokers"), "no factor is named 'wrokers'"),
        (("--data", "/nowhere"), "make pack"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_line_and_status_2(root, capsys, args, complaint):
    status, _, errors = call_tune(capsys, root, *args)
    assert status == 2
    assert errors.count("\n") == 1
    assert complaint in errors


def test_ctrl_c_keeps_table_and_winner_so_far(root):
    command = [sys.executable, "-m", "scripts.tune_loader", *where(root), "--cache", "disk", "--workers", "2"]
    process = subprocess.Popen(
        [*command, "--budget-s", "30"],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for line in process.stdout:
        if line.startswith("  workers"):
            break
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "it was stopped before all was tried" in out
    outcome = json.loads((root / "manifests" / "shades.tune.json").read_text())
    assert outcome["stopped"] == "user"
    assert outcome["trials"][0]["factor"] == "workers"
    tuned = read_tuned(tuned_path(root / "manifests", "shades"))
    assert (tuned is not None) == (outcome["winner"] != outcome["start"])  # an earlier winner would stay


def test_interrupted_before_anything_was_measured_nothing_is_saved(root, capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(LoaderTrials, "__call__", interrupt)
    status, lines, _ = call_tune(capsys, root)
    assert status == 130
    assert "verdict   it was stopped before anything was measured" in lines
    assert not tuned_path(root / "manifests", "shades").exists()


# The file.

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(
    tuning=st.builds(
        Tuning,
        workers=st.integers(0, 512),
        threads=st.integers(1, 64),
        prefetch=st.integers(1, 64),
        readers=st.integers(0, 64),
        pin=st.booleans(),
        cache=st.sampled_from(["ram", "disk", "off"]),
    ),
    machine=st.builds(
        Machine, cpu=texts, cores=st.integers(1, 512), memory_bytes=st.integers(1, 1 << 45), gpu=texts
    ),
    speed=st.floats(0, 1e9),
)
@settings(max_examples=60, deadline=None)
def test_a_file_reads_back_as_it_was_written(tmp_path_factory, tuning, machine, speed):
    path = tmp_path_factory.mktemp("tuned") / "x.tuned.toml"
    measured = Measured(device="cuda", clips_per_s_before=speed, clips_per_s_after=1.0, date="2031-12-24")
    tuned = Tuned(tuning=tuning, clips=SHAPE, measured=measured, machine=machine)
    write_tuned(path, tuned)
    assert read_tuned(path) == tuned


def test_the_file_says_how_to_undo_it_and_is_in_sections(tmp_path):
    write_tuned(tmp_path / "x.tuned.toml", tuned_of(MACHINE))
    text = (tmp_path / "x.tuned.toml").read_text()
    assert "# otherwise. To undo it, delete this file, or give --tuned off." in text
    tables = tomllib.loads(text)
    assert list(tables) == ["store", "loader", "clips", "measured", "machine"]
    assert tables["loader"] == {"workers": 1, "threads": 1, "prefetch": 2, "readers": 0, "pin": False}


def test_no_file_is_nothing_and_a_damaged_one_is_named(tmp_path):
    path = tmp_path / "x.tuned.toml"
    assert read_tuned(path) is None
    write_tuned(path, tuned_of(MACHINE))
    whole = path.read_text()
    for old, new, complaint in (
        ("workers = 1", "workers = ", "cannot be read"),
        ("workers = 1", "workers = true", "workers must be int, got True"),
        ("workers = 1", "workers = -1", "workers and readers must be 0 or more"),
        ("prefetch = 2", "prefetch = 0", "prefetch"),
        ('cache = "disk"', 'cache = "tape"', "cache must be one of"),
        ("readers = 0", "", "has no 'readers'"),
        ("[clips]", "[clip]", "has no 'clips'"),
    ):
        path.write_text(whole.replace(old, new))
        with pytest.raises(TunedError, match=complaint) as error:
            read_tuned(path)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(TunedError, match="cannot be read"):
        read_tuned(path)


@pytest.mark.parametrize(
    ("machine", "clips", "device", "says"),
    [
        ({}, {}, "cpu", None),
        ({"cpu": "another"}, {}, "cpu", None),
        ({"memory_bytes": int(1.04 * (16 << 30))}, {}, "cpu", None),
        ({"memory_bytes": 32 << 30}, {}, "cpu", "measured on 4 cores, "),
        ({"cores": 1}, {}, "cpu", "this machine has 1 core, "),
        ({"gpu": "A GPU"}, {}, "cpu", "A GPU"),
        ({}, {}, "cuda", "measured for training on cpu, and this is on cuda"),
        ({}, {"frames": 32}, "cpu", "and these are 6 clips of 32 frames of 16x16 px"),
        ({}, {"batch_size": 7}, "cpu", "measured with 6 clips of 4 frames of 16x16 px"),
    ],
)
def test_what_was_measured_elsewhere_does_not_hold_here(machine, clips, device, says):
    found = find_misfit(tuned_of(MACHINE), replace(MACHINE, **machine), replace(SHAPE, **clips), device)
    assert found is None if says is None else says in found


# `make train` takes it up.


def take_up(
    root: Path, loading: LoaderSpec = LOADING, *, local_world: int = 1, **options
) -> tuple[RunOptions, LoaderSpec]:
    options = RunOptions(dataset="shades", data=root, manifests=root / "manifests", **options)
    ranks = Ranks()
    object.__setattr__(ranks, "local_world", local_world)
    return with_tuned(options, loading, SHAPE, device=CPU, ranks=ranks)


def save(root: Path, tuned: Tuned) -> Path:
    path = tuned_path(root / "manifests", "shades")
    write_tuned(path, tuned)
    return path


BEST = {"workers": 3, "threads": 2, "prefetch": 4, "readers": 2}


def test_training_takes_it_up_and_says_so(root, capsys):
    path = save(root, tuned_of(**BEST))
    options, loading = take_up(root)
    assert loading == LoaderSpec(batch_size=6, **BEST)
    assert options.cache == "disk"
    assert capsys.readouterr().out == (
        f"loader    workers 3, threads 2, prefetch 4, readers 2, cache disk, by {path}; delete it, or give "
        "--tuned off, to undo\n"
    )


def test_options_that_are_given_win(root, capsys):
    save(root, tuned_of(**BEST))
    options, loading = take_up(root, LoaderSpec(batch_size=6, workers=1, prefetch=3), cache="off")
    assert loading == LoaderSpec(batch_size=6, workers=1, prefetch=3, readers=2)  # threads go with workers
    assert options.cache == "off"
    assert capsys.readouterr().out.startswith("loader    readers 2, by ")
    assert take_up(root, tuned="off")[1] == LoaderSpec(batch_size=6)
    assert capsys.readouterr().out == ""


def test_ranks_of_one_machine_share_the_workers(root):
    save(root, tuned_of(workers=5, threads=3))
    assert take_up(root, local_world=2)[1].workers == 2
    assert take_up(root, local_world=8)[1].workers == 1


def test_what_is_usual_here_changes_nothing_and_is_not_mentioned(root, capsys):
    usual = share_cores(LoaderSpec(), CPU, Ranks())
    save(root, tuned_of(workers=usual.num_workers, cache="ram"))
    assert take_up(root) == (
        RunOptions(dataset="shades", data=root, manifests=root / "manifests"),
        LoaderSpec(batch_size=6),
    )
    assert capsys.readouterr().out == ""


def test_a_store_that_is_gone_is_not_asked_for(root):
    save(root, tuned_of(cache="disk"))
    (root / "shades" / "pack").rename(root / "elsewhere")
    assert take_up(root)[0].cache == "auto"


def test_a_file_that_does_not_hold_is_left_with_one_warning(root, capsys):
    path = save(root, tuned_of(MACHINE if MACHINE.cores != read_machine().cores else None, **BEST))
    write_tuned(path, replace(tuned_of(**BEST), machine=replace(read_machine(), cores=999)))
    assert take_up(root)[1] == LoaderSpec(batch_size=6)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"warning: {path} is not used: measured on 999 cores, ")
    assert "run `make tune DATASET=shades`" in line
    path.write_text("[loader")
    assert take_up(root)[1] == LoaderSpec(batch_size=6)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"warning: {path} cannot be read (")
    assert line.endswith("trained without it")


def test_training_ends_with_the_same_weights_whatever_was_tuned(root, capsys, request):
    states = []
    request.addfinalizer(lambda: release_ram(root / "shades" / "pack"))
    for tuning in (None, {"workers": 2, "threads": 2, "prefetch": 3, "readers": 2, "cache": "off"}):
        if tuning:
            save(root, tuned_of(**tuning))
        out = root / f"run{len(states)}"
        options = ("--epochs", "1", "--lr", "0.02", "--out", str(out), "--stride", "1")
        status, lines, errors = call(capsys, train.main, root, *options)
        assert (status, errors) == (0, "")
        assert any(line.startswith("loader    workers 2") for line in lines) == bool(tuning)
        states.append(train.read_checkpoint(out / "last.pt").model)
    assert all(torch.equal(values, states[1][name]) for name, values in states[0].items())
