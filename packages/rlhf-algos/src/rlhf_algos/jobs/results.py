"""What a finished run leaves behind: results.json, training curves, a model card."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from rlhf_algos.jobs.model_card import write_model_card
from rlhf_algos.tracking.run_facts import versions
from rlhf_data import RunFolder

__all__ = ["finish_run"]

_LOG = logging.getLogger(__name__)
_PACKAGES = (
    "rlhf-algos",
    "rlhf-data",
    "rlhf-infer",
    "rlhf-models",
    "accelerate",
    "peft",
    "torch",
    "transformers",
)
_FINAL = "final"


def finish_run(
    run: RunFolder,
    *,
    method: str,
    config: Mapping[str, Any],
    before: Mapping[str, float] | None,
    after: Mapping[str, float] | None,
    wall_time: Mapping[str, float],
    **facts: Any,
) -> dict[str, Any]:
    """Write `training_curves.png`, the model card of `final/`, then `results.json`: the run is finished.

    Args:
        run: the run's folder, with its metrics.jsonl; `final/` may be missing, then there is no card.
        method: its name, as in `METHODS`.
        config: the resolved settings.
        before: held-out metrics of the start model; None without held-out rows.
        after: held-out metrics of the trained model.
        wall_time: seconds by part; `training` and `total` among them.
        **facts: what else results.json is to say, JSON values; they go before what is said otherwise.

    Returns:
        What was written: `method`, `before`, `after`, `last_step` (the last line of metrics.jsonl), `steps`,
        `num_tokens`, `tokens_per_second` (tokens of this process's training over its time; of a resumed run,
        None), `samples_per_second` (the median over the steps), `peak_memory_gb` (the most of any step),
        `wall_time`, `versions`, and the facts.

    Raises:
        DiskFullError: nothing can be added to the disk; the run is not marked as finished.
    """
    from rlhf_eval import can_draw, metric_keys, training_curves

    rows = run.read_metrics()
    last = rows[-1] if rows else {}
    seconds = wall_time.get("training")
    tokens = facts.get("num_tokens", last.get("num_tokens"))
    whole = bool(seconds and tokens) and not facts.get("resumed")
    results = {
        "method": method,
        "before": dict(before) if before else None,
        "after": dict(after) if after else None,
        "last_step": last,
        "steps": last.get("step", 0),
        "num_tokens": tokens,
        "tokens_per_second": tokens / seconds if whole and tokens and seconds else None,
        "samples_per_second": _summary(median, rows, "samples_per_second"),
        "peak_memory_gb": _summary(max, rows, "peak_memory_gb"),
        "wall_time": dict(wall_time),
        "versions": versions(_PACKAGES),
        **facts,
    }
    if (keys := metric_keys(rows)) and not can_draw():
        _LOG.info("training_curves.png is not drawn: matplotlib is missing; pip install 'rlhf-algos[plots]'")
    elif keys:
        name = run.path.resolve().name
        training_curves(rows, keys, run.path / "training_curves.png", title=_title(method, name))
    if (run.path / _FINAL).is_dir():
        write_model_card(run.path / _FINAL, method=method, config=config, results=results)
    run.write_results(results)
    return results


def _title(method: str, name: str) -> str:
    return method if name == method else f"{method}: {name}"


def _summary(
    how: Callable[[list[float]], float], rows: Sequence[Mapping[str, Any]], key: str
) -> float | None:
    """Of a metric's values over the steps; None where no step has one."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return how(values) if values else None
