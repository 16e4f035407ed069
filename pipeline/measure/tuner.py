"""One factor at a time from the best so far: what is faster beyond the noise is taken, a row for each trial.

Nothing here knows of loaders: a setting is any value that can be hashed, and measuring one is a function.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import median
from typing import Generic, Literal, TypeVar

from pipeline.errors import PipelineError

S = TypeVar("S")
Finding = Literal["faster", "slower", "no difference", "cannot run", "runs", "unfinished"]


class TrialError(PipelineError):
    """This setting cannot be measured; others can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """When two settings count as different, and how often they are measured to find out."""

    margin: float = 0.03
    """Difference that counts, as a share of the best's speed: below it the cheaper of two is kept. What is
    given away so adds up, and stays below this in all."""
    least_rounds: int = 3
    """Rounds before anything is decided; each measures both, one after the other."""
    most_rounds: int = 9
    """Rounds after which what is still within the noise counts as no difference."""
    passes: int = 2
    """How often the factors are gone through at most; once more only where something was taken."""

    def __post_init__(self) -> None:
        if not 0 < self.margin < 1 or self.passes < 1 or not 3 <= self.least_rounds <= self.most_rounds:
            raise ValueError(
                f"margin must be in (0, 1), passes >= 1, 3 <= least_rounds <= most_rounds, got {self}"
            )

    @property
    def last_rounds(self) -> int:
        """Of the last comparison where time is short: from 5 on, `bounds` are not moved out."""
        return min(max(self.least_rounds, 5), self.most_rounds)


RULE = Rule()


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor(Generic[S]):
    """One thing that can be set."""

    name: str
    candidates: Callable[[S], Sequence[S]]
    """From the best so far to settings that differ from it in this alone."""
    only_shown: bool = False
    """Whether it is measured, and never taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial(Generic[S]):
    """A setting beside the best of that time."""

    factor: str
    setting: S
    against: S
    rates: tuple[float, ...] = ()
    """Of the setting, in each round."""
    against_rates: tuple[float, ...] = ()
    """Of the other, in the same rounds."""
    finding: Finding
    taken: bool = False
    reason: str = ""
    """Why it cannot run; empty where it can."""

    @property
    def difference(self) -> float | None:
        """Median of the rounds' differences, as a share: 0.1 is 10 % faster; None without a round."""
        logs = differences(self.rates, self.against_rates)
        return math.exp(median(logs)) - 1 if logs else None

    @property
    def noise(self) -> float | None:
        """Half the width of the difference's bounds, as a share; None where there were too few rounds."""
        logs = differences(self.rates, self.against_rates)
        if len(logs) < 3:
            return None
        low, high = bounds(logs)
        return math.exp((high - low) / 2) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Generic[S]):
    """What came of it."""

    start: S
    """What was begun with; where that cannot run, the first setting that can."""
    winner: S
    trials: tuple[Trial[S], ...]
    final: Trial[S] | None
    """The winner beside the start; None where that is the winner, or where there was no time to compare."""
    stopped: Literal["", "time", "user"]
    """What ended the search before all was tried."""
    rates: Mapping[S, tuple[float, ...]]
    """All that was measured of each setting."""

    def speeds(self) -> tuple[float, float]:
        """Of the start and of the winner: side by side where there was time; 0 where nothing was measured."""
        if self.final is not None and self.winner != self.start and self.final.difference is not None:
            before = median(self.final.against_rates)
            return before, before * (1 + self.final.difference)
        return median(self.rates.get(self.start, (0.0,))), median(self.rates.get(self.winner, (0.0,)))


Measure = Callable[[S], float]
"""Speed of a setting in one repeat, above 0; TrialError where it cannot run."""


def tune(
    start: S,
    factors: Sequence[Factor[S]],
    measure: Measure[S],
    *,
    cost: Callable[[S], tuple[int, ...]],
    fallbacks: Sequence[S] = (),
    rule: Rule = RULE,
    has_time: Callable[[int], bool] = lambda rounds: True,
    on_trial: Callable[[Trial[S]], object] = lambda trial: None,
) -> Outcome[S]:
    """Try each factor's candidates beside the best so far, and take what is better.

    cost         what a setting takes of the machine, compared as tuples: less is cheaper
    fallbacks    what to begin with, the first that runs, where the start and all candidates cannot
    has_time     asked before each round: whether there is time for so many, which are that one and those of
                 the last comparison, where there will be one
    on_trial     gets each row when it is done

    In each round both are measured, and the order turns from round to round (A B, B A, A B ...), so that a
    machine that gets faster or slower does it to both. What a round finds is the ratio of the two speeds.
    After at least `least_rounds`, a candidate is

    * taken where it is faster by `margin` in the median of the rounds, and faster at all beyond the noise,
      that is, the lower bound of the difference (`bounds`) is above zero
    * taken where it is cheaper, and not slower by more than `margin`, less what was given away before
    * left otherwise: rounds go on only while they can still decide, and end at `most_rounds`

    At the end, the winner is compared with the start in the same way, in fewer rounds where time is short:
    where it is not better after all, the start is the winner. No two settings are compared twice but there,
    and there are at most `passes` over the factors, so that it ends.

    A candidate that cannot run is a row with the reason; where the start cannot, what runs first takes its
    place. Ctrl-C ends the search and keeps what was measured. PipelineError where nothing runs.
    """
    search = _Search(measure, cost, rule, has_time, on_trial, start, start)
    final = None
    try:
        search.begin(factors, fallbacks)
        search.go(factors)
        final = search.compare_with_start()
    except KeyboardInterrupt:
        search.stopped = "user"
    return Outcome(
        start=search.start,
        winner=search.best,
        trials=tuple(search.trials),
        final=final,
        stopped=search.stopped,
        rates={setting: tuple(rates) for setting, rates in search.rates.items()},
    )


def differences(rates: Sequence[float], against: Sequence[float]) -> list[float]:
    """Logarithm of the ratio of each round that has both."""
    return [math.log(rate / other) for rate, other in zip(rates, against, strict=False)]


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """Bounds of what values scatter around, such that chance rarely puts it outside; of 3 values or more.

    The k-th from below and from above, k so great that the median is outside of them with a chance of at
    most 1 in 32 on each side: of 5 to 8 the outermost, from 9 on the next ones, so that an outlier counts
    for nothing. Of 3 or 4 even the outermost are not safe: they are moved out by the distance between them.

    >>> bounds([1.0, 2.0, 4.0])
    (-2.0, 7.0)
    >>> bounds([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -50.0])
    (1.0, 7.0)
    """
    ordered, count = sorted(values), len(values)
    if count < 3:
        raise ValueError(f"bounds need 3 values or more, got {count}")
    if count < 5:
        spread = ordered[-1] - ordered[0]
        return ordered[0] - spread, ordered[-1] + spread
    k, chance = 0, 1 / 2**count
    while chance <= 1 / 32:
        k += 1
        chance += math.comb(count, k) / 2**count
    return ordered[k - 1], ordered[-k]


def decide(logs: Sequence[float], *, rule: Rule, is_cheaper: bool, given: float = 0.0) -> bool | None:
    """Whether to take a candidate after these differences; None where more can still tell.

    given  what was given away for cheaper settings before, as a logarithm
    """
    if len(logs) < rule.least_rounds:
        return None
    margin, (low, high), middle = math.log1p(rule.margin), bounds(logs), median(logs)
    is_over = len(logs) >= rule.most_rounds
    if low > 0 and middle >= margin:
        return True
    if not is_cheaper:
        return False if is_over or high < margin else None
    least = given - margin
    if low > least or high < least or is_over:
        return middle > least
    return None


def describe_difference(logs: Sequence[float], *, rule: Rule) -> Finding:
    """What differences say, whatever is made of it."""
    if len(logs) < rule.least_rounds:
        return "unfinished"
    margin, (low, high), middle = math.log1p(rule.margin), bounds(logs), median(logs)
    if low > 0 and middle >= margin:
        return "faster"
    return "slower" if high < 0 and middle <= -margin else "no difference"


@dataclass(slots=True)
class _Search(Generic[S]):
    """Where a search stands."""

    measure: Measure[S]
    cost: Callable[[S], tuple[int, ...]]
    rule: Rule
    has_time: Callable[[int], bool]
    on_trial: Callable[[Trial[S]], object]
    start: S
    best: S
    trials: list[Trial[S]] = field(default_factory=list)
    given: float = 0.0
    compared: set[frozenset[S]] = field(default_factory=set)
    stopped: Literal["", "time", "user"] = ""
    rates: dict[S, list[float]] = field(default_factory=dict)

    def begin(self, factors: Sequence[Factor[S]], fallbacks: Sequence[S]) -> None:
        """Have a setting to begin with that runs; measuring it once also warms the machine up."""
        own = (each for factor in factors if not factor.only_shown for each in factor.candidates(self.start))
        first: TrialError | None = None
        for setting in dict.fromkeys(chain([self.start], own, fallbacks)):
            try:
                self._measure(setting)
            except TrialError as error:
                self._add("start", setting, finding="cannot run", reason=str(error))
                first = first or error
                continue
            if first is not None:
                self._add("start", setting, finding="runs", taken=True)
            self.start = self.best = setting
            return
        raise PipelineError(f"no setting can be measured; the first: {first}") from first

    def go(self, factors: Sequence[Factor[S]]) -> None:
        """Pass after pass, while something is taken and there is time."""
        for _ in range(self.rule.passes):
            before = self.best
            for factor in factors:
                if not factor.only_shown:
                    self._try(factor)
            if self.best == before or self.stopped:
                break
        for factor in factors:
            if factor.only_shown:
                self._try(factor)

    def _try(self, factor: Factor[S]) -> None:
        # Not what the best is by then: a candidate differs from it in this factor alone, however often it
        # was replaced meanwhile.
        for candidate in factor.candidates(self.best):
            pair = frozenset((self.best, candidate))
            if len(pair) == 1 or pair in self.compared:
                continue
            if self._is_late():
                self.stopped = "time"
                return
            self.compared.add(pair)
            self._compare(factor.name, candidate, self._is_late, only_shown=factor.only_shown)

    def _is_late(self) -> bool:
        """Whether there is no time for one more round, and then to compare with the start."""
        last = 0 if self.best == self.start else self.rule.last_rounds
        return not self.has_time(1 + last)

    def compare_with_start(self) -> Trial[S] | None:
        """The winner beside the start; gives the start its place back where it is not better after all."""
        taken = [trial for trial in self.trials if trial.taken and trial.finding != "runs"]
        if self.best == self.start:
            return None
        if len(taken) == 1:
            return taken[0]  # this very comparison
        winner, self.best, self.given = self.best, self.start, 0.0
        if not self.has_time(self.rule.most_rounds):
            self.rule = replace(self.rule, most_rounds=self.rule.last_rounds)
        try:
            return self._compare("all", winner, lambda: False)
        except KeyboardInterrupt:
            self.best = winner
            raise

    def _compare(
        self, name: str, candidate: S, is_late: Callable[[], bool], *, only_shown: bool = False
    ) -> Trial[S]:
        """Rounds until it is decided."""
        against, is_cheaper = self.best, self.cost(candidate) < self.cost(self.best)
        rates: dict[S, list[float]] = {against: [], candidate: []}
        reason, verdict = "", None
        try:
            while verdict is None and not is_late():
                self._round(rates, candidate, against)
                logs = differences(rates[candidate], rates[against])
                verdict = decide(logs, rule=self.rule, is_cheaper=is_cheaper, given=self.given)
        except TrialError as error:
            reason, verdict = str(error), False
        finally:  # also where it is interrupted, the row says what was measured
            taken = bool(verdict) and not only_shown
            logs = differences(rates[candidate], rates[against])
            found = describe_difference(logs, rule=self.rule) if verdict is not None else "unfinished"
            if verdict is None:
                self.stopped = "time"
            if taken:
                self.best = candidate
                self.given += max(-median(logs), 0.0)
            trial = self._add(
                name,
                candidate,
                against=against,
                rates=tuple(rates[candidate][: len(logs)]),
                against_rates=tuple(rates[against][: len(logs)]),
                finding="cannot run" if reason else found,
                taken=taken,
                reason=reason,
            )
        return trial

    def _round(self, rates: dict[S, list[float]], candidate: S, against: S) -> None:
        is_even = len(rates[candidate]) % 2 == 0
        for setting in (against, candidate) if is_even else (candidate, against):
            rates[setting].append(self._measure(setting))

    def _measure(self, setting: S) -> float:
        rate = self.measure(setting)
        self.rates.setdefault(setting, []).append(rate)
        return rate

    def _add(
        self,
        name: str,
        setting: S,
        *,
        finding: Finding,
        against: S | None = None,
        rates: tuple[float, ...] = (),
        against_rates: tuple[float, ...] = (),
        taken: bool = False,
        reason: str = "",
    ) -> Trial[S]:
        trial = Trial(
            factor=name,
            setting=setting,
            against=self.best if against is None else against,
            rates=rates,
            against_rates=against_rates,
            finding=finding,
            taken=taken,
            reason=reason,
        )
        self.trials.append(trial)
        self.on_trial(trial)
        return trial
