"""Batch diagnostics: verdict error rates, ratio of reward components, share that keeps the format."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from rlhf_algos.advantages import group_baseline
from rlhf_minmax.game.forward_pass import Answer, CritiqueSample


def verdict_errors(critiques: Sequence[CritiqueSample], labels: Tensor) -> tuple[float | None, float | None]:
    """Shares of right answers not called right, and of wrong ones not called wrong; None without any such.

    An unparsable critique counts as an error.
    """
    said = [c.parsed.verdict if c.parsed else None for c in critiques]
    rates = []
    for label, verdict in ((True, "right"), (False, "wrong")):
        of_class = [each for each, own in zip(said, labels.tolist(), strict=True) if own is label]
        rates.append(sum(each != verdict for each in of_class) / len(of_class) if of_class else None)
    return rates[0], rates[1]


def spread_ratio(first: Tensor, second: Tensor, groups: Tensor) -> float | None:
    """Ratio of the standard deviations of two parts of a reward within groups.

    Args:
        first: (B,) one part.
        second: (B,) the other.
        groups: (B,) index of each completion's group.

    Returns:
        None if the second part does not vary within groups.
    """
    a, b = (float(group_baseline(part, groups).square().mean().sqrt()) for part in (first, second))
    return a / b if b > 0 else None


def critique_rates(critiques: Sequence[CritiqueSample]) -> dict[str, float]:
    """Shares of critiques that keep the format, have valid evidence, or were cut off."""
    count = max(len(critiques), 1)
    return {
        "monitor/parse_rate": sum(c.parsed is not None for c in critiques) / count,
        "monitor/evidence_valid_rate": sum(c.evidence_valid for c in critiques) / count,
        "monitor/truncated_rate": sum(c.rollout.finish_reason == "length" for c in critiques) / count,
    }


def form_match(answers: Sequence[Answer], made_up: Callable[[str], str]) -> tuple[float | None, str]:
    """Share of a policy's answers that are worded exactly as made-up ones, white space included.

    Most made-up answers have the label that is rarer among the policy's own, so a difference in wording would
    give the right verdict away.

    Returns:
        Share of the answers that name a choice, None if none does; one that is worded otherwise, or "".
    """
    named = [(answer.text, made_up(answer.claim)) for answer in answers if answer.claim is not None]
    foreign = [text for text, expected in named if text != expected]
    share = 1 - len(foreign) / len(named) if named else None
    return share, foreign[0] if foreign else ""
