"""`make tune`: one factor of loading at a time, a row for each trial, the winner saved for `make train`."""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Annotated, Literal, cast

import tyro

from pipeline.files import write_text
from pipeline.manifest import Manifest
from pipeline.measure.trials import (
    FACTORS,
    LoaderSetting,
    LoaderTrials,
    TrialStores,
    loader_cost,
    loader_factors,
    loader_fallbacks,
)
from pipeline.measure.tuned import (
    HeldIn,
    Measured,
    Tuned,
    Tuning,
    read_machine,
    tuned_path,
    write_tuned,
)
from pipeline.measure.tuner import Outcome, Rule, tune
from pipeline.online import ClipDataset, EpochSampler, LoaderSpec, WindowSpec
from pipeline.online.loader import ClipLoader
from pipeline.online.ram import RAM_ROOT
from pipeline.online.store import Cache, Store
from pipeline.training.ranks import ALONE
from scripts import run
from scripts.train import build_training_loader, describe_run
from scripts.train_options import ClipOptions, RunOptions
from scripts.train_place import Place, choose_device, share_cores, stopping
from scripts.train_tuned import clip_shape
from scripts.tune_output import HEADER, TuneBar, format_setting, format_verdict, tune_json


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """What is tuned for, and where the outcome goes."""

    dataset: str = "sample"
    """The folder below DATA that holds `frames/` and, if it was packed, `pack/`."""
    data: Path = Path("data")
    """Root of the datasets."""
    manifests: Path = Path("manifests")
    """Where the manifest is, as DATASET.parquet; the winner goes beside it, as DATASET.tuned.toml."""
    model: str = "small"
    """The model to train, which says how large clips are."""
    factors: tuple[str, ...] = FACTORS
    """What is tried, of workers, threads, cache, readers, prefetch and pin. `batch` shows other batch sizes,
    and is never taken."""
    budget_s: float = 120.0
    """Seconds after which it is over, about."""
    step_ms: float = 0.0
    """Milliseconds of a stand-in for the training step, which only waits; 0: batches are taken as fast as
    they come."""
    split: str = "split01"
    """Column of the manifest that says which videos are trained on."""
    cache: Cache = "auto"
    """Where frames are read from to begin with, as in `train`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What will be trained on. On the CPU, the model has half of the cores."""
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """Where to write the table as JSON; without it MANIFESTS/DATASET.tune.json."""

    def __post_init__(self) -> None:
        if self.budget_s <= 0 or self.step_ms < 0:
            raise ValueError(f"budget_s must be > 0, step_ms >= 0, got {self.budget_s} and {self.step_ms}")
        loader_factors(self.factors, cores=1, has_cuda=False)  # names are checked before anything is done

    def for_training(self) -> RunOptions:
        """The same as options of `train`."""
        names = ("dataset", "data", "manifests", "model", "split", "cache", "device")
        return RunOptions(**{name: getattr(self, name) for name in names})


OPTIONS, CLIPS, WINDOW = TuneOptions(), ClipOptions(), WindowSpec()
LOADING, RULE = LoaderSpec(batch_size=8), Rule()

_SHORTEST_S, _LONGEST_S = 0.3, 2.0
"""Of a repeat: below, waking workers shows; above, nothing is gained that another round would not."""


def main(
    options: TuneOptions = OPTIONS,
    clips: ClipOptions = CLIPS,
    window: WindowSpec = WINDOW,
    loading: LoaderSpec = LOADING,
) -> int:
    """Find how to load DATASET fastest on this machine, and save it where `train` takes it up.

    One factor at a time is tried beside the best so far: both are measured in turns, until the difference is
    beyond the noise, or counts as none; then what takes less of the machine is kept. No trial changes what is
    in a batch. Options are those of `train`, and what is begun with is what it would do untuned.

    Args:
        options: What is tuned for, and where the outcome goes.
        clips: Which clips are drawn, and what is done to their pictures.
        window: Which frames make up a clip.
        loading: How batches are made, to begin with.
    """
    device = choose_device(options.device, ALONE)
    root = options.data / options.dataset
    with stopping() as stop:
        loading = share_cores(loading, device, ALONE)
        place = Place(options.for_training(), device, ALONE, loading, stop)
        rows = place.read_manifest().select(**{options.split: "train"})
        shape = clip_shape(place.options, clips, window, loading)
        stores, winner = TrialStores(root / "frames", root / "pack", rows), None
        try:
            opened = stores.open(options.cache)
            print(f"frames    {opened.reason}")
            loader = plain_loader(place, clips, window, rows, opened.store)
            start = LoaderSetting(tuning=usual_tuning(loading, opened.cache), batch_size=loading.batch_size)
            outcome = search(options, place, loader, start, stores)
            winner = outcome.winner.tuning.cache if outcome.rates else None
        finally:
            stores.let_go(keep=winner)
    before, after = outcome.speeds()
    measured = Measured(
        device="cuda" if device.type == "cuda" else "cpu",
        clips_per_s_before=before,
        clips_per_s_after=after,
        date=today(),
    )
    tuned = Tuned(tuning=outcome.winner.tuning, clips=shape, measured=measured, machine=read_machine())
    save(options, outcome, tuned)
    return 128 + (stop.signal or signal.SIGINT) if outcome.stopped == "user" else 0


def plain_loader(
    place: Place, clips: ClipOptions, window: WindowSpec, rows: Manifest, store: Store
) -> ClipLoader:
    """The loader of `train`, without workers: none is started here, and so nothing is refused yet."""
    about = describe_run(place.options, clips, window, rows)
    plain = replace(place, loading=replace(place.loading, workers=0, pin=False))
    return build_training_loader(plain, clips, about, rows, store, seed=0)


def usual_tuning(loading: LoaderSpec, cache: HeldIn) -> Tuning:
    """What `train` does where nothing was tuned."""
    return Tuning(
        workers=loading.num_workers,
        threads=loading.threads,
        prefetch=loading.prefetch,
        readers=loading.readers,
        pin=loading.pins,
        cache=cache,
    )


def search(
    options: TuneOptions,
    place: Place,
    loader: ClipLoader,
    start: LoaderSetting,
    stores: TrialStores,
) -> Outcome[LoaderSetting]:
    """The trials, after lines that say of what; a line for each, and for what else there is to know."""
    cores = share_cores(LoaderSpec(), place.device, ALONE).num_workers
    has_cuda = place.device.type == "cuda"
    factors = loader_factors(options.factors, cores=cores, has_cuda=has_cuda)
    count = 1 + sum(len(factor.candidates(start)) for factor in factors)
    repeat_s = min(max(options.budget_s / (20 * count), _SHORTEST_S), _LONGEST_S)
    print(f"machine   {read_machine()}; cores for the loader: {cores}")
    print(f"begin     {format_setting(start)}")
    print(
        f"plan      up to {count} trials of {RULE.least_rounds} to {RULE.most_rounds} rounds, about "
        f"{repeat_s:.1f} s a repeat; over after {options.budget_s:g} s. Ctrl-C keeps what was measured"
    )
    print(f"\n{HEADER}", flush=True)
    begin, sampler = time.monotonic(), cast(EpochSampler, loader.sampler)
    with (
        LoaderTrials(
            cast(ClipDataset, loader.dataset),
            sampler,
            place.loading,
            open_store=lambda cache: stores.open(cache).store,
            repeat_s=repeat_s,
            device=place.device,
            step_s=options.step_ms / 1e3,
        ) as trials,
        closing(TuneBar(trials, options.budget_s, is_asked_to_stop=place.stop.is_asked)) as bar,
    ):
        outcome = tune(
            start,
            factors,
            bar,
            cost=loader_cost,
            fallbacks=loader_fallbacks(start),
            rule=RULE,
            has_time=lambda rounds: time.monotonic() - begin + trials.reserve_s(rounds) < options.budget_s,
            on_trial=bar.show,
        )
    print()
    for note in notes(cores, has_cuda=has_cuda, epochs=trials.clips_taken / max(len(sampler), 1)):
        print(f"note      {note}")
    print(f"took      {time.monotonic() - begin:.0f} s", flush=True)
    return outcome


def notes(cores: int, *, has_cuda: bool, epochs: float) -> Iterator[str]:
    """What is missing here, and what that means."""
    if not has_cuda:
        yield "no GPU in use: pinned memory is not tried, and half of the cores are left to the model"
    if cores == 1:
        yield "one core for the loader: there is nothing to share out among workers and their threads"
    if not RAM_ROOT.is_dir():
        yield f"no {RAM_ROOT}: workers have nowhere to leave batches, and frames cannot be held in memory"
    if epochs > 1:
        yield f"{epochs:.0f} epochs of clips were read, all but the first from memory, as far as that goes"


def save(options: TuneOptions, outcome: Outcome[LoaderSetting], tuned: Tuned) -> None:
    """Write table and winner, and say so."""
    lines = [format_verdict(outcome, RULE)]
    table = options.json_file or options.manifests / f"{options.dataset}.tune.json"
    winner = tuned_path(options.manifests, options.dataset)
    if outcome.stopped != "user" or outcome.winner != outcome.start:  # else an earlier winner stays
        write_tuned(winner, tuned)
        lines += [f"saved     {winner}: `make train` takes it up; delete it, or give --tuned off, to undo"]
    lines += [f"next      {next_step(options, outcome)}"]
    text = json.dumps(tune_json(outcome, tuned, RULE, lines), ensure_ascii=False, indent=1)
    write_text(table, text + "\n")
    print(f"table     {table}", *lines, sep="\n")


def next_step(options: TuneOptions, outcome: Outcome[LoaderSetting]) -> str:
    """What to do now."""
    model = "" if options.model == OPTIONS.model else f" MODEL={options.model}"
    if outcome.stopped == "user":
        return f"make tune DATASET={options.dataset}, to try the rest"
    if outcome.winner == outcome.start:
        return f"make profile DATASET={options.dataset} says what limits training"
    return f"make train DATASET={options.dataset}{model}, with the same options for clips"


def today() -> str:
    """As 2031-12-24."""
    return date.today().isoformat()


if __name__ == "__main__":
    run(main, resumes=False)
