"""Gates: whether a model may take another's place, by tests on the rows that it was measured on."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from rlhf_data import BaseConfig, UserError, finite
from rlhf_eval.stats import (
    Interval,
    exact_proportion,
    fisher_exact,
    holm,
    mean_interval,
    proportion_difference,
    proportion_interval,
    sign_test,
    units_needed,
    verdict_difference,
)
from rlhf_eval.stats.differences import EXACT, rows_that_agree
from rlhf_eval.stats.interval import bisect_range, normal_quantile

__all__ = ["Gate", "GateVerdict", "Scores", "judge_gates", "rows_to_find_drop", "verdict_of_all"]

Scores = Mapping[str, float]
"""Scores by row: two evaluations are paired by these keys."""
Outcome = Literal["pass", "fail", "inconclusive"]
_VERDICTS = (0, 0.5, 1)
_POWER = 0.8
_FEWEST = 8
"""Equal differences of fewer rows than this show nothing."""


class Gate(BaseConfig):
    """A condition on one metric: a gate passes when a test shows it, and fails when one shows the opposite.

    With `margin` it is non-inferiority: pass when the loss is shown to be smaller than the margin, fail when
    a loss is shown at all and is estimated at more than the margin.
    """

    metric: str
    """Name of a measured metric, or `suites` for every capability suite, each with this condition."""
    against: Literal["start", "previous", "baseline"] | None = None
    """Reference of the comparison, row by row where the rows are the same; null compares the mean itself with
    the threshold."""
    margin: float | None = Field(default=None, ge=0)
    """Loss that does not matter, in units of the metric; needs `against`, and no threshold."""
    op: Literal[">", ">=", "<", "<="] = ">="
    """On which side of the threshold the mean, or mean difference, has to be; `<` where less is better."""
    threshold: float | None = None
    """Of the mean, or of the difference where `against` is set."""
    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """Risk of a wrong pass, of one gate, and of a wrong fail, of all gates together."""

    @model_validator(mode="after")
    def _one_condition(self) -> Gate:
        if (self.margin is None) == (self.threshold is None):
            raise ValueError(f"the gate on {self.metric} needs either margin or threshold; give one of them")
        if self.margin is not None and self.against is None:
            raise ValueError(
                f"the gate on {self.metric} has a margin, which is a loss against something; set against to "
                "start, previous or baseline"
            )
        return self

    @property
    def sign(self) -> int:
        """1 where more is better, else −1."""
        return 1 if self.op.startswith(">") else -1

    @property
    def passes_above(self) -> float:
        """Bound that the mean times `sign` must exceed to pass."""
        return -self.margin if self.margin is not None else self.sign * (self.threshold or 0.0)

    @property
    def fails_below(self) -> float:
        """Bound below which the mean times `sign` is shown to lie when the gate fails."""
        return 0.0 if self.margin is not None else self.passes_above


@dataclass(frozen=True)
class GateVerdict:
    """Verdict of a gate.

    Attributes:
        metric: The metric.
        condition: The condition in words.
        outcome: pass, fail, or inconclusive where the rows show neither.
        estimate: Mean, or mean difference.
        low: Lower end of its two-sided interval of level 1 − 2α.
        high: Upper end.
        rows: Rows of the candidate.
        other_rows: Rows that they were compared with, if those are other ones; else None.
        too_few_others: Whether no number of the candidate's rows would do because those are too few.
        missing_rows: Further rows of the candidate that would show a pass with probability 0.8, if no
            difference is the truth (with a margin) or the estimate is, 0 where as many as there are should
            have; None unless inconclusive, and where no number would.
        p_value: One-sided, of failing by chance, corrected by Holm over all gates.
    """

    metric: str
    condition: str
    outcome: Outcome
    estimate: float
    low: float
    high: float
    rows: int
    missing_rows: int | None
    p_value: float
    other_rows: int | None = None
    too_few_others: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return finite(asdict(self))

    @property
    def reason(self) -> str:
        """One line: what was found, and what is missing."""
        against = "" if self.other_rows is None else f" against {self.other_rows} other ones"
        if math.isnan(self.estimate):
            whose = "what it is compared with" if self.rows else "the candidate"
            return f"{self.metric}: {self.rows} rows{against} decide nothing; {whose} has none yet"
        ends = "" if math.isnan(self.low) else f" [{self.low:+.4g}, {self.high:+.4g}]"
        found = f"{self.metric}: {self.estimate:+.4g}{ends} over {self.rows} rows{against}"
        said = {
            "pass": f"shows {self.condition}",
            "fail": f"contradicts {self.condition} (p = {self.p_value:.2g})",
            "inconclusive": f"does not decide {self.condition}",
        }[self.outcome]
        more = ""
        if self.outcome == "inconclusive" and self.missing_rows == 0:
            more = f"; as many rows show it with a probability of {_POWER:.0%}, so a few more may"
        elif self.outcome == "inconclusive" and self.missing_rows is not None:
            more = f"; about {self.missing_rows:,} more would show it, with a probability of {_POWER:.0%}"
        elif self.outcome == "inconclusive" and self.too_few_others:
            more = (
                f"; no number of rows would show it against {self.other_rows} other ones, so more of both "
                "are needed; more rows alone may show the contrary"
            )
        elif self.outcome == "inconclusive":
            more = "; the estimate is not beyond the limit, so more rows like these would not show it"
        return f"{found} {said}{more}"


def judge_gates(
    gates: Sequence[Gate],
    measured: Mapping[str, Scores],
    others: Mapping[str, Mapping[str, Scores]] | None = None,
    *,
    suites: Sequence[str] = (),
    unpaired: Collection[str] = (),
) -> list[GateVerdict]:
    """Judge every gate.

    A gate passes by its own test: all have to pass, which needs no correction (Berger 1982,
    "Multiparameter hypothesis testing and acceptance sampling"). Failing is corrected over all gates by
    Holm's method, so that of models no worse than before at most a share α fails.

    Args:
        gates: the conditions; one on `suites` stands for one on each suite.
        measured: metrics of the candidate, their scores by row.
        others: the same of `start`, `previous` and `baseline`, as far as they are there.
        suites: names of the metrics that are capability suites.
        unpaired: names of the metrics that are shares of right rows (0 or 1 each) and measured on other rows
            for every model, such as the ratings of those that it was served to.

    Returns:
        Verdicts in the order of the gates.

    Raises:
        UserError: a metric or a comparison is missing, or two evaluations share no rows.
    """
    every = [
        gate if gate.metric != "suites" else gate.model_copy(update={"metric": suite})
        for gate in gates
        for suite in (suites if gate.metric == "suites" else ("",))
    ]
    if not every:
        raise UserError(
            "a gate on suites has no capability suite to judge; measure some with a stage of kind capability",
            code="missing_metric",
            metric="suites",
        )
    compared = [_compared(gate, measured, others or {}, gate.metric not in unpaired) for gate in every]
    found = [_judge(gate, each) for gate, each in zip(every, compared, strict=True)]
    corrected = holm([verdict.p_value for verdict in found])
    return [
        _settle(gate, replace(verdict, p_value=p))
        for gate, verdict, p in zip(every, found, corrected, strict=True)
    ]


def verdict_of_all(verdicts: Sequence[GateVerdict]) -> Outcome:
    """Fail if any gate fails, pass if all pass, else inconclusive."""
    outcomes = {verdict.outcome for verdict in verdicts}
    return "fail" if "fail" in outcomes else "inconclusive" if "inconclusive" in outcomes else "pass"


def rows_to_find_drop(
    drop: float = 0.05, *, changed: float = 0.2, suites: int = 1, alpha: float = 0.05, power: float = _POWER
) -> int:
    """Rows per suite at which a drop is found with this power, even if only one of the suites has it.

    ((z_(1−α/suites) + z_power) · sd / drop)² with sd = √(changed − drop²), the spread of differences of right
    and wrong answers of which a share `changed` differs between the models.

    Args:
        drop: loss of accuracy, 0.05 for five points.
        changed: share of rows on which exactly one of the two models is right.
        suites: number of tests that Holm corrects for.
        alpha: risk of a wrong fail.
        power: probability of finding it.
    """
    return units_needed(drop, math.sqrt(changed - drop**2), power=power, level=1 - 2 * alpha / suites)


@dataclass(frozen=True)
class _Compared:
    """Scores of a candidate and of what it is compared with: of the same rows, in order, if paired."""

    new: np.ndarray
    old: np.ndarray | None
    paired: bool

    @property
    def verdicts(self) -> bool:
        """Whether right and wrong answers to the same questions are compared."""
        both = (self.new, self.old)
        return self.paired and all(each is not None and np.isin(each, _VERDICTS).all() for each in both)

    @property
    def differences(self) -> np.ndarray:
        """Of each row; the scores themselves where they are compared with none."""
        return self.new if self.old is None else self.new - self.old


def _compared(
    gate: Gate, measured: Mapping[str, Scores], others: Mapping[str, Mapping[str, Scores]], paired: bool
) -> _Compared:
    new = _metric(gate, measured, "candidate")
    if gate.against is None:
        return _Compared(np.array(list(new.values()), dtype=float), None, paired)
    if gate.against not in others:
        raise UserError(
            f"the gate on {gate.metric} compares with {gate.against}, which was not measured; name its "
            f"evaluation under {gate.against}",
            code="missing_comparison",
            metric=gate.metric,
            against=gate.against,
        )
    old = _metric(gate, others[gate.against], gate.against)
    if not paired:
        return _Compared(np.array(list(new.values())), np.array(list(old.values())), paired)
    shared = [key for key in new if key in old]
    if len(shared) < max(len(new), len(old)):
        raise UserError(
            f"the gate on {gate.metric}: {len(shared)} rows are shared by the {len(new)} of the candidate "
            f"and the {len(old)} of {gate.against}; measure both on the same rows",
            code="unpaired_rows",
            metric=gate.metric,
            shared=len(shared),
        )
    return _Compared(np.array([new[key] for key in shared]), np.array([old[key] for key in shared]), paired)


def _metric(gate: Gate, measured: Mapping[str, Scores], whose: str) -> Scores:
    if gate.metric not in measured:
        known = ", ".join(sorted(measured)) or "none"
        raise UserError(
            f"the gate on {gate.metric}: the {whose} has no such metric; measured are {known}",
            code="missing_metric",
            metric=gate.metric,
        )
    return measured[gate.metric]


def _judge(gate: Gate, compared: _Compared) -> GateVerdict:
    """Estimate, interval and uncorrected p-value; the outcome is settled after the correction."""
    difference = f"difference to {gate.against}" if gate.against else "mean"
    condition = (
        f"a loss to {gate.against} of less than {gate.margin:g}"
        if gate.margin is not None
        else f"a {difference} {gate.op} {gate.threshold:g}"
    )
    other_rows = None if compared.old is None or compared.paired else len(compared.old)
    if not len(compared.new) or other_rows == 0:
        nothing = (math.nan, math.nan, math.nan, len(compared.new), None, 1.0)
        return GateVerdict(gate.metric, condition, "inconclusive", *nothing, other_rows=other_rows)
    found = _interval(compared, gate, 1 - 2 * gate.alpha)
    low, high = sorted((gate.sign * found.low, gate.sign * found.high))
    missing, too_few_others = _missing(gate, compared, found)
    return GateVerdict(
        gate.metric,
        condition,
        "inconclusive",
        gate.sign * found.estimate,
        *(low, high, len(compared.new)),
        missing_rows=missing,
        p_value=_fail_p(gate, compared, found),
        other_rows=other_rows,
        too_few_others=too_few_others,
    )


def _settle(gate: Gate, verdict: GateVerdict) -> GateVerdict:
    low, estimate = (verdict.low, verdict.estimate) if gate.sign > 0 else (-verdict.high, -verdict.estimate)
    limit = gate.passes_above
    if low > limit or (low == limit and gate.op.endswith("=") and gate.margin is None):
        return replace(verdict, outcome="pass", missing_rows=None, too_few_others=False)
    if verdict.p_value < gate.alpha and estimate < limit:
        return replace(verdict, outcome="fail", missing_rows=None, too_few_others=False)
    return verdict


def _interval(compared: _Compared, gate: Gate, level: float) -> Interval:
    """Interval of the mean, or of the mean difference, times the gate's sign."""
    new, old = compared.new, compared.old
    if old is not None and not compared.paired:
        return _signed(proportion_difference(new, old, level=level), gate)
    values = gate.sign * compared.differences
    if compared.verdicts:
        return verdict_difference(values, level=level)
    if old is None and np.isin(new, (0, 1)).all():
        return _signed(exact_proportion(new, level=level), gate)
    if old is None and ((new >= 0) & (new <= 1)).all():
        return _signed(proportion_interval(new, level=level), gate)
    found = mean_interval(values, level=level)
    if math.isnan(found.low) and len(values) >= _FEWEST:  # every row says the same
        return replace(found, low=found.estimate, high=found.estimate)
    return found


def _signed(found: Interval, gate: Gate) -> Interval:
    low, high = sorted((gate.sign * found.low, gate.sign * found.high))
    return replace(found, estimate=gate.sign * found.estimate, low=low, high=high)


def _fail_p(gate: Gate, compared: _Compared, found: Interval) -> float:
    """One-sided p-value of a mean that is at least what failing denies.

    Right and wrong answers against others' take McNemar's exact test; other values the bootstrap, which is
    asked for the p-value of the shifted mean; rates of other rows Fisher's exact test; others the level whose
    interval just reaches the limit.
    """
    limit = gate.fails_below
    if not found.estimate < limit:
        return 1.0
    if compared.verdicts and compared.old is not None and limit == 0:
        return sign_test(compared.new, compared.old) / 2
    if compared.old is not None and not compared.paired and limit == 0:
        first, second = (compared.new, compared.old) if gate.sign > 0 else (compared.old, compared.new)
        return fisher_exact(first, second)
    if found.method != "studentised bootstrap" and found.method != "Student's t":
        return _touching(gate, compared, limit)
    shifted = mean_interval(gate.sign * compared.differences - limit)
    return 0.0 if shifted.p_value is None else shifted.p_value / 2


def _touching(gate: Gate, compared: _Compared, limit: float) -> float:
    """The α whose interval of level 1 − 2α ends at the limit, by halving."""

    def reaches(alpha: float) -> bool:
        return not _interval(compared, gate, 1 - 2 * alpha).high < limit

    return bisect_range(0.0, 0.5, reaches, steps=40)[1]


def _missing(gate: Gate, compared: _Compared, found: Interval) -> tuple[int | None, bool]:
    """Rows of the candidate that are missing to show a pass with power 0.8, None where no number would.

    And whether none would because what it is compared with has too few rows of its own.
    """
    distance = (0.0 if gate.margin is not None else found.estimate) - gate.passes_above
    if not distance > 0:
        return None, False
    unpaired = compared.old is not None and not compared.paired
    variance = float((compared.new if unpaired else compared.differences).var())
    if unpaired and compared.old is not None and compared.old.var():
        # var/n + var_old/m may be (distance / (z_(1−α) + z_power))², of which the other rows leave the rest
        most = (distance / (normal_quantile(1 - gate.alpha) + normal_quantile(_POWER))) ** 2
        left = most - float(compared.old.var()) / len(compared.old)
        if not left > 0:
            return None, True
        needed = math.ceil(variance / left)
    elif variance:
        needed = units_needed(distance, math.sqrt(variance), power=_POWER, level=1 - 2 * gate.alpha)
    else:
        needed = rows_that_agree(distance, gate.alpha, exact=found.method == EXACT)
    return max(0, needed - len(compared.new)), False
