"""Requests and tokens of judges behind an API, and their cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from rlhf_algos.process_group import all_gather
from rlhf_infer import APIJudge, APIUsage
from rlhf_minmax.scorers.distributed import ScoredByFirst, ScoredInParts


def api_usage(judge: object, held_out_judge: object = None) -> dict[str, dict[str, Any]]:
    """Requests and tokens of all processes since they started; every process must call it.

    `judge` and `held_out_judge` are as `shared_out` returns them; None if there is none.

    Returns:
        `judge` and `held_out_judge`, those that are behind an API, each with the fields of `APIUsage`.
    """
    usage = {}
    for name, each in (("judge", judge), ("held_out_judge", held_out_judge)):
        if (api := _api_judge(each)) is not None:
            usage[name] = asdict(total_usage(all_gather([api.usage])))
    return usage


def total_usage(parts: Sequence[APIUsage]) -> APIUsage:
    """The sum of a judge's usage in several processes; no cost where one counts none."""
    costs = [part.cost for part in parts if part.cost is not None]
    counts = (field.name for field in fields(APIUsage) if field.name != "cost")
    sums = {name: sum(getattr(part, name) for part in parts) for name in counts}
    return APIUsage(**sums, cost=sum(costs) if len(costs) == len(parts) else None)


def _api_judge(judge: object) -> APIJudge | None:
    """The judge behind an API that processes share, or that a single one has; None for another kind."""
    if isinstance(judge, ScoredByFirst | ScoredInParts):
        judge = judge.scorer
    return judge if isinstance(judge, APIJudge) else None
