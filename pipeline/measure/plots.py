"""A picture of a profile: bars of what a batch, a step and the ceiling take; and how busy the machine was."""

from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.files import replaced
from pipeline.measure.profiler import Profile
from pipeline.measure.verdict import supply_s

_COLOURS = {
    # Of Okabe and Ito, which people who cannot tell red from green can tell apart, too.
    "read": "#0072B2",
    "decode": "#E69F00",
    "augment": "#009E73",
    "sources": "#56B4E9",
    "batch": "#CC79A7",
    "prepare": "#F0E442",
    "step": "#4D4D4D",
    "waits: not made yet": "#D55E00",
    "waits: on its way": "#F3A683",
    "waits: copy, prepare": "#F7D3C0",
}
_LEAST_LABELLED = 0.07

Bar = tuple[str, dict[str, float]]


def bars_of(profile: Profile) -> list[Bar]:
    """What is drawn: the name of each bar, and the milliseconds of its parts.

    The first is a worker's time for a batch, divided by the workers: the time from one batch to the next
    that they are able to bring. All three can be compared, and the longer of the first two sets the pace.
    """
    times, workers = profile.times, max(profile.setting.workers, 1)
    made = {
        "read": times.read_s,
        "decode": times.decode_s,
        "augment": times.augment_s,
        "sources": times.sources_s,
        "batch": times.batch_s,
    }
    is_on_host = not profile.setting.is_cuda  # where preparing is a part of what the step waits for
    prepared = min(times.prepare_s, times.handing_s) if is_on_host else 0.0
    run = {
        "waits: not made yet": times.making_s,
        "waits: on its way": times.transport_s,
        "waits: copy, prepare": times.handing_s - prepared,
        "prepare": prepared,
        "step": times.step_s,
    }
    supply = f"making a batch\nin {workers} worker{'s' * (workers > 1)}"
    if not profile.setting.workers:
        supply = "making a batch\n(no workers)"
    bars = [
        (supply, {name: seconds / workers for name, seconds in made.items()}),
        ("a step\nof training", run),
        ("the ceiling:\none batch kept", {"step": times.ceiling_s}),
    ]
    return [(name, {part: 1e3 * seconds for part, seconds in parts.items()}) for name, parts in bars]


def draw_profile(profile: Profile, path: Path, *, title: str) -> None:
    """Write a PNG; PipelineError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PipelineError(f"no picture: matplotlib is missing ({error}): pip install matplotlib") from error
    figure = Figure(figsize=(10, 6.2), dpi=110, layout="constrained")
    bars, machine = figure.subplots(2, 1, height_ratios=(3, 2))
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    _draw_bars(bars, bars_of(profile), behind_ms=1e3 * supply_s(profile.times, profile.setting))
    _draw_machine(machine, profile)
    with replaced(path) as beside:
        figure.savefig(beside, format="png")


def _draw_bars(axes: Any, bars: list[Bar], *, behind_ms: float) -> None:
    longest = max(sum(parts.values()) for _, parts in bars)
    seen: set[str] = set()
    for row, (_, parts) in enumerate(bars):
        left = 0.0
        for part, width in parts.items():
            if width < 0.002 * longest:
                continue
            label = None if part in seen else part
            seen.add(part)
            axes.barh(row, width, left=left, height=0.62, color=_COLOURS[part], label=label)
            if width > _LEAST_LABELLED * longest:
                colour = "white" if part in ("step", "read", "waits: not made yet") else "black"
                axes.text(left + width / 2, row, f"{width:.1f}", ha="center", va="center", color=colour)
            left += width
        axes.text(left + 0.008 * longest, row, f"{left:.1f} ms", va="center", fontweight="bold")
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * longest)
    axes.set_xlabel("ms from one batch, or step, to the next")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 0.99), ncols=5, frameon=False, fontsize=9)


def _draw_machine(axes: Any, profile: Profile) -> None:
    """Cores, the GPU and the disk over the time of the run."""
    samples = profile.use.samples
    if not samples:
        axes.text(0.5, 0.5, "the run was too short to look at the machine", ha="center", va="center")
        axes.set_axis_off()
        return
    times = [sample.time_s for sample in samples]
    num_cores = len(samples[0].cores)
    for core in range(num_cores):
        shares = [100 * sample.cores[core] for sample in samples]
        axes.plot(times, shares, color="#0072B2", linewidth=0.8, alpha=max(0.5 / num_cores, 0.08))
    mean = [100 * sum(sample.cores) / num_cores for sample in samples]
    axes.plot(times, mean, color="#0072B2", linewidth=2, label=f"{num_cores} cores, mean (thin: each)")
    if samples[0].gpu is not None:
        gpu = [100 * (sample.gpu or 0.0) for sample in samples]
        axes.plot(times, gpu, color="#009E73", linewidth=2, label="GPU")
    axes.set_ylim(0, 105)
    axes.set_xlim(0, max(times[-1], 1e-3))
    axes.set_xlabel("s")
    axes.set_ylabel("% busy")
    axes.spines[["top"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    if samples[0].disk_bytes_per_s is not None:
        disk = axes.twinx()
        rates = [(sample.disk_bytes_per_s or 0.0) / 1e6 for sample in samples]
        disk.plot(times, rates, color="#D55E00", linewidth=1.5, linestyle=":", label="disk reads (right)")
        disk.set_ylim(0, max(1.05 * max(rates), 1.0))
        disk.set_ylabel("MB/s")
        disk.spines[["top"]].set_visible(False)
        more = disk.get_legend_handles_labels()
        handles, labels = handles + more[0], labels + more[1]
    axes.legend(
        handles, labels, loc="lower left", bbox_to_anchor=(-0.01, 0.99), ncols=3, frameon=False, fontsize=9
    )
