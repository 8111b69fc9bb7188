"""What an evaluation says of its judges."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_eval.evaluation.findings import evaluation_findings


def interval(estimate: float, low: float, high: float) -> dict[str, float]:
    return {"estimate": estimate, "low": low, "high": high}


@pytest.mark.parametrize(
    ("low", "high", "said"), [(0.6, 0.95, True), (0.4, 0.97, False), (0.05, 0.3, True), (0.1, 0.6, False)]
)
def test_a_judge_is_biased_only_where_its_interval_says_so(low: float, high: float, said: bool) -> None:
    first = (low + high) / 2
    verdicts: dict[str, Any] = {
        "prompts": 12,
        "win_rate": interval(0.5, 0.3, 0.7),
        "detectable": 0.8,
        "first_wins": interval(first, low, high),
        "bias": interval(first - 0.5, low - 0.5, high - 0.5),
        "unread": 0,
    }
    compared = {"name": "after", "other": "before", "judges": {"Ann": verdicts}}
    found = evaluation_findings({"models": [], "comparisons": [compared]})
    assert any("biased" in text for text in found) is said
