"""Selection of the prompts to show, independent of the order of the rows."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Literal

from rlhf_data import UserError
from rlhf_eval.samples.sources import Case

Selection = Literal["random", "best", "worst", "disagree", "stratified"]


def select_cases(cases: Sequence[Case], how: Selection, count: int, *, seed: int = 0) -> list[Case]:
    """`count` cases, or all if there are fewer.

    - `stratified`: one at random from each of `count` quantiles of the score of the last model (of the
      lengths of its completions, where it has no scores), the lowest first;
    - `best`, `worst`: the highest, the lowest scores, a mean over the models;
    - `disagree`: the largest differences between the models' scores;
    - `random`.

    The draw depends on the seed and the prompts only, not on the order of the rows.

    Raises:
        UserError: `how` needs scores, or several models, and there are none.
    """

    def draw(case: Case) -> str:
        return hashlib.sha256(f"{seed} {case.prompt}".encode("utf-8", "surrogatepass")).hexdigest()

    shuffled = sorted(cases, key=draw)
    return SELECTIONS[how](shuffled, min(count, len(cases)))


def _stratified(cases: Sequence[Case], count: int) -> list[Case]:
    last = {id(case): list(case.completions.values())[-1] for case in cases}
    if all(completion.score is not None for completion in last.values()):
        ranked = sorted(cases, key=lambda case: last[id(case)].score or 0.0)
    else:
        ranked = sorted(cases, key=lambda case: len(last[id(case)].text))
    edges = [round(i * len(ranked) / count) for i in range(count + 1)] if count else []
    order = {id(case): place for place, case in enumerate(cases)}  # of the random draw
    return [
        min(ranked[start:stop], key=lambda case: order[id(case)]) for start, stop in itertools.pairwise(edges)
    ]


def _scores(case: Case) -> list[float]:
    scores = [each.score for each in case.completions.values() if each.score is not None]
    if not scores:
        raise UserError(
            "selecting needs scores; take --select random, or name a column with --score",
            code="unscored_rows",
        )
    return scores


def _disagree(cases: Sequence[Case], count: int) -> list[Case]:
    if any(len(case.completions) < 2 for case in cases):
        raise UserError(
            "--select disagree compares the scores of several models; give more than one",
            code="unused_option",
        )
    return sorted(cases, key=lambda case: min(_scores(case)) - max(_scores(case)))[:count]


SELECTIONS: dict[Selection, Callable[[Sequence[Case], int], list[Case]]] = {
    "stratified": _stratified,
    "random": lambda cases, count: list(cases[:count]),
    "best": lambda cases, count: sorted(cases, key=lambda case: -fmean(_scores(case)))[:count],
    "worst": lambda cases, count: sorted(cases, key=lambda case: fmean(_scores(case)))[:count],
    "disagree": _disagree,
}
"""How cases are selected, by name."""
