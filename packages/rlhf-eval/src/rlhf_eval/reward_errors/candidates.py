"""Prompts with several completions, correct and incorrect ones, as in RewardBench 2, and their scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from rlhf_eval.stats import Interval, mean_interval, mean_of_parts, paired_difference, proportion_interval

TIES = "Ties"
"""The subset whose prompts have several correct completions, which ought to score about the same."""
_SMALLEST_SLICE = 10


@dataclass(frozen=True)
class ScoredCandidates:
    """n prompts, each with correct and incorrect completions, and what a reward model scores them.

    Attributes:
        prompts: n prompts as text.
        completions: the completions of each prompt as text, the correct ones first.
        num_correct: how many completions of each prompt are correct: at least one, and not all.
        scores: the scores of each prompt's completions.
        subsets: the subset of each prompt; `Ties` is scored in its own way.
        ids: the id of each prompt; in `Ties` `ref:N` or `tied:N`, see `tie_of`.
        groups: further columns of the rows, by name: n values of each.
    """

    prompts: Sequence[str]
    completions: Sequence[Sequence[str]]
    num_correct: Sequence[int]
    scores: Sequence[np.ndarray]
    subsets: Sequence[str]
    ids: Sequence[str]
    groups: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def is_tie(self) -> np.ndarray:
        """(n,) whether a prompt is of the subset Ties."""
        return np.array([subset == TIES for subset in self.subsets])

    @cached_property
    def correct(self) -> np.ndarray:
        """(n,) whether the model is right: the share of correct ones among those it scores highest.

        In Ties 1 where every correct completion is above every incorrect one, else 0.
        """
        return np.array(
            [
                float(_gap(scores, count) > 0) if tie else _best(scores, count)
                for scores, count, tie in zip(self.scores, self.num_correct, self.is_tie, strict=True)
            ]
        )

    @cached_property
    def chance(self) -> np.ndarray:
        """(n,) what `correct` is in the mean where scores are drawn at random: k / m, in Ties 1 / C(m, k)."""
        return np.array(
            [
                1 / math.comb(len(scores), count) if tie else count / len(scores)
                for scores, count, tie in zip(self.scores, self.num_correct, self.is_tie, strict=True)
            ]
        )


def tie_of(name: str) -> tuple[str, str] | None:
    """Kind and number of a row of Ties, from its id `ref:N` or `tied:N`; None for any other id.

    `tied:N` has several correct completions, `ref:N` one of them, after the same prompt or one like it.
    """
    kind, colon, number = name.partition(":")
    return (kind, number) if kind in ("ref", "tied") and colon and number else None


def analyse_candidates(rows: ScoredCandidates, *, baseline: ScoredCandidates | None = None) -> dict[str, Any]:
    """Accuracy of a reward model by subset, and its mean over subsets, as JSON values.

    A prompt counts where the highest score is that of a correct completion, 1/j where j share it (best-of-4
    accuracy of RewardBench 2, Malik et al. 2025, https://arxiv.org/abs/2506.01937). Ties has a score of its
    own, see `_ties`. The mean over subsets weighs them equally, as RewardBench 2 does.

    Args:
        rows: the prompts with the model's scores.
        baseline: the same prompts with another model's.

    Raises:
        ValueError: `rows` is empty, or no row of Ties has its counterpart.
    """
    if not len(rows):
        raise ValueError("rows is empty; expected at least one prompt")
    subsets: dict[str, Any] = {}
    parts: list[Interval] = []
    for name in dict.fromkeys(rows.subsets):
        inside = np.array([subset == name for subset in rows.subsets])
        if name == TIES:
            found, interval = _ties(rows, inside)
        else:
            interval = proportion_interval(rows.correct[inside], unit="prompt")
            found = {**_entry(interval, inside), "chance": float(rows.chance[inside].mean())}
        subsets[name] = found
        parts.append(interval)
    results = {
        "rows": len(rows),
        "completions": sum(map(len, rows.scores)),
        "subsets": subsets,
        "mean_over_subsets": asdict(mean_of_parts(parts)),
        "slices": _slices(rows),
    }
    if baseline is not None:
        difference = paired_difference(rows.correct, baseline.correct, unit="prompt")
        theirs = asdict(proportion_interval(baseline.correct, unit="prompt"))
        results["baseline"] = {"accuracy": theirs, "difference": asdict(difference)}
    return results


def _ties(rows: ScoredCandidates, inside: np.ndarray) -> tuple[dict[str, Any], Interval]:
    """The score of the subset Ties, over its pairs of a row `ref:N` and a row `tied:N`.

    With g_r and g_t the worst correct score less the best incorrect one, of the reference and the tied row,
    and s the tied row's best correct score less its worst correct one, the score of a pair is
    .3·[g_t > 0] + .3·[g_r > 0] + .2·[g_t > s] + .2·[min(g_r, g_t) > s] + .01·tanh(min(g_r, g_t)/s − 1),
    where the last term is 0 for 0/0. That is what the code of RewardBench 2 computes
    (https://github.com/allenai/reward-bench, `process_single_model`), the mean being taken pair by pair: so
    correct completions ought to be above incorrect ones, and nearer to each other than to those.
    """
    pairs: dict[str, dict[str, int]] = {}
    for i in np.flatnonzero(inside):
        kind, number = tie_of(rows.ids[int(i)]) or ("", "")
        pairs.setdefault(number, {})[kind] = int(i)
    whole = [pair for pair in pairs.values() if {"ref", "tied"} <= set(pair)]
    if not whole:
        raise ValueError("no row of Ties has its counterpart; expected rows ref:N and tied:N")
    found = np.array([_tie_scores(rows, pair["ref"], pair["tied"]) for pair in whole])
    interval = mean_interval(found @ np.array(_WEIGHTS), unit="pair of prompts")
    entry = {
        **_entry(interval, inside),
        "chance": None,
        "accuracy": {
            kind: {
                **_entry(proportion_interval(values, unit="prompt"), np.ones(len(whole), dtype=bool)),
                "chance": float(np.mean([rows.chance[pair[kind]] for pair in whole])),
            }
            for kind, values in (("tied", found[:, 0]), ("ref", found[:, 1]))
        },
        "preferred": float(found[:, 2].mean()),
        "preferred_hard": float(found[:, 3].mean()),
        "margin": float(found[:, 4].mean()),
        "without_counterpart": int(inside.sum()) - 2 * len(whole),
    }
    return entry, interval


_WEIGHTS = (0.3, 0.3, 0.2, 0.2, 0.01)


def _tie_scores(rows: ScoredCandidates, ref: int, tied: int) -> tuple[float, ...]:
    """The five terms of `_ties`, without their weights."""
    gap_ref, gap = (_gap(rows.scores[i], rows.num_correct[i]) for i in (ref, tied))
    right = rows.scores[tied][: rows.num_correct[tied]]
    spread, least = float(right.max() - right.min()), min(gap_ref, gap)
    ratio = least / spread if spread else math.copysign(math.inf, least)
    margin = math.tanh(ratio - 1) if spread or least else 0.0
    return float(gap > 0), float(gap_ref > 0), float(gap > spread), float(least > spread), margin


def _gap(scores: np.ndarray, count: int) -> float:
    """The worst correct score less the best incorrect one."""
    return float(scores[:count].min() - scores[count:].max())


def _best(scores: np.ndarray, count: int) -> float:
    highest = scores == scores.max()
    return float(highest[:count].sum() / highest.sum())


def _entry(interval: Interval, inside: np.ndarray) -> dict[str, Any]:
    return {**asdict(interval), "rows": int(inside.sum())}


def _slices(rows: ScoredCandidates) -> dict[str, dict[str, Any]]:
    """Accuracy by the values of further columns; values with fewer than 10 rows are left out."""
    found = {}
    for kind, values in rows.groups.items():
        shares = {}
        for label in sorted({*map(str, values)}):
            inside = np.array([str(value) == label for value in values])
            if inside.sum() >= _SMALLEST_SLICE:
                share = proportion_interval(rows.correct[inside], unit="prompt")
                shares[label] = {**_entry(share, inside), "chance": float(rows.chance[inside].mean())}
        if shares:
            found[kind] = shares
    return found
