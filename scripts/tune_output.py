"""What tuning shows: a bar, a row for each trial, the verdict; and the same for programs."""

import time
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any, Never

from tqdm import tqdm

from pipeline.measure.trials import LoaderSetting
from pipeline.measure.tuned import Tuned, Tuning
from pipeline.measure.tuner import Outcome, Rule, Trial

Row = Trial[LoaderSetting]
Tunes = Outcome[LoaderSetting]

HEADER = (
    f"  {'factor':<9} {'tried':<22} {'clips/s':>8} {'best':>8} {'differs':>8} {'noise':>6} {'rounds':>6}"
    "  what came of it"
)


class TuneBar:
    """Measures for `tune`, and shows on a terminal what, and how much of the time is gone."""

    def __init__(
        self,
        measure: Callable[[LoaderSetting], float],
        budget_s: float,
        *,
        is_asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._measure, self._begin, self._is_asked = measure, time.monotonic(), is_asked_to_stop
        # `disable=None` is tqdm's own way to be quiet where there is no terminal.
        self._bar: tqdm[Never] = tqdm(
            total=round(budget_s),
            desc="tune",
            bar_format="{desc} |{bar}| {n_fmt}/{total_fmt} s{postfix}",
            disable=None,
            dynamic_ncols=True,
            leave=False,
        )

    def __call__(self, setting: LoaderSetting) -> float:
        """Clips per second; KeyboardInterrupt after the repeat in which a stop was asked for."""
        self._bar.set_postfix_str(format_setting(setting))
        try:
            rate = self._measure(setting)
        finally:
            if self._is_asked():
                raise KeyboardInterrupt
        self._bar.update(min(round(time.monotonic() - self._begin), self._bar.total or 0) - self._bar.n)
        return rate

    def show(self, row: Row) -> None:
        """A line of the table, above the bar."""
        self._bar.clear()
        print(format_row(row), flush=True)
        self._bar.refresh()

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()


def format_setting(setting: LoaderSetting) -> str:
    """All of it, in a few words."""
    tuning = setting.tuning
    words = [f"{name} {_word(value)}" for name, value in asdict(tuning).items()]
    return ", ".join([*words, f"clips in a batch {setting.batch_size}"])


def format_change(setting: LoaderSetting, against: LoaderSetting) -> str:
    """What of a setting is not as in another one."""
    names = [each.name for each in fields(Tuning)]
    changed = [
        f"{name} {_word(getattr(setting.tuning, name))}"
        for name in names
        if getattr(setting.tuning, name) != getattr(against.tuning, name)
    ]
    if setting.batch_size != against.batch_size:
        changed.append(f"batch {setting.batch_size}")
    return ", ".join(changed)


def format_row(row: Row) -> str:
    """One line of the table."""
    tried = format_change(row.setting, row.against) or "as begun with"
    numbers = [
        _number(row.rates, "{:,.0f}"),
        _number(row.against_rates, "{:,.0f}"),
        "-" if row.difference is None else f"{100 * row.difference:+.1f} %",
        "-" if row.noise is None else f"{100 * row.noise:.1f} %",
        str(len(row.rates)),
    ]
    widths = (8, 8, 8, 6, 6)
    columns = " ".join(f"{text:>{width}}" for text, width in zip(numbers, widths, strict=True))
    return f"  {row.factor:<9} {tried:<22} {columns}  {_fate(row)}"


def _number(rates: tuple[float, ...], form: str) -> str:
    return form.format(sorted(rates)[len(rates) // 2]) if rates else "-"


def _fate(row: Row) -> str:
    if row.finding == "cannot run":
        return f"cannot run: {row.reason}"
    if row.finding == "runs":
        return "taken: the first that runs"
    if row.finding == "unfinished":
        return "left: time was up"
    if row.factor == "batch":
        return f"{row.finding}; only shown, since it changes what a batch holds"
    if row.taken:
        return "taken: faster" if row.finding == "faster" else "taken: as fast, and takes less"
    return "left: slower" if row.finding == "slower" else "left: no difference that counts"


def _word(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


# The verdict.


def format_verdict(outcome: Tunes, rule: Rule) -> str:
    """In words, on one line."""
    if not outcome.rates:
        return "verdict   it was stopped before anything was measured"
    first, (before, after) = outcome.trials[:1], outcome.speeds()
    if outcome.winner != outcome.start:
        change, old = (
            format_change(*pair)
            for pair in ((outcome.winner, outcome.start), (outcome.start, outcome.winner))
        )
        gain = "as fast, and takes less"
        if _is_faster(outcome, rule, after / before):
            gain = f"{100 * (after / before - 1):.0f} % faster"
        text = f"{change} is {gain} than {old}: {after:,.0f} clips/s, before {before:,.0f}"
    elif any(row.rates for row in outcome.trials):
        text = f"what was begun with stays: nothing is faster by {100 * rule.margin:g} % and beyond the noise"
    else:
        text = "what was begun with stays: there was nothing to compare it with"
    if first and first[0].factor == "start":
        text = f"the usual settings cannot run here ({first[0].reason}); of those that can, {text}"
    return f"verdict   {text}{_ENDED[outcome.stopped]}"


_ENDED = {
    "": "",
    "time": "; time was up before all was tried: a greater --budget-s may find more",
    "user": "; it was stopped before all was tried",
}


def _is_faster(outcome: Tunes, rule: Rule, ratio: float) -> bool:
    return outcome.final.finding == "faster" if outcome.final else ratio >= 1 + rule.margin


def tune_json(outcome: Tunes, tuned: Tuned, rule: Rule, lines: list[str]) -> dict[str, Any]:
    """A run for programs: clips per second, differences and noise as shares."""
    return {
        "verdict": lines,
        "machine": asdict(tuned.machine),
        "clips": asdict(tuned.clips),
        "measured": asdict(tuned.measured),
        "rule": asdict(rule),
        "start": asdict(outcome.start),
        "winner": asdict(outcome.winner),
        "stopped": outcome.stopped,
        "trials": [
            {**asdict(row), "difference": row.difference, "noise": row.noise} for row in outcome.trials
        ],
    }
