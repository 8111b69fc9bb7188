"""Report of a preparation, in numbers."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlhf_data.preprocessing.config import PreprocessConfig
from rlhf_data.preprocessing.scan import CONVERTED, REASONS, SHORTENED, Scan

if TYPE_CHECKING:
    from rlhf_data.preprocessing.plan import Plan

_BINS = 30


def make_report(scan: Scan, plan: Plan, config: PreprocessConfig, tokenizer: Any) -> dict[str, Any]:
    """Return counts by reason, strata, lengths before and after, and the settings.

    The keys: `rows` (read, kept, train, eval), `left_out` by reason, `changed`, `duplicate_prompts`, `strata`
    (each with its source, smallest and largest length, rows, what it is due and what it has), `edges`,
    `lengths` (unit, histograms over common `edges`), `over_max_length` by source, `tokenizer`, `settings`.
    """
    before, after = scan.column("before"), scan.column("after")
    kept, changed = plan.reason == 0, scan.column("changed")
    counts = np.bincount(plan.reason, minlength=len(REASONS))
    read = np.ones(len(kept), bool)
    read[list(scan.errors)] = False
    return {
        "rows": {
            "read": len(kept),
            "kept": int(kept.sum()),
            "train": int((kept & ~plan.held_out).sum()),
            "eval": int(plan.held_out.sum()),
        },
        "left_out": {name: int(n) for name, n in zip(REASONS[1:], counts[1:], strict=True) if n},
        "changed": {
            "rows": int((changed[kept] > 0).sum()),
            "converted": int((changed[kept] & CONVERTED > 0).sum()),
            "shortened": int((changed[kept] & SHORTENED > 0).sum()),
        },
        "ties": int(scan.column("tied").sum()),
        "duplicate_prompts": plan.duplicate_prompts,
        "strata": _strata(plan, after[kept]),
        "edges": plan.edges,
        "lengths": _lengths(before[read], after[kept], after[plan.held_out], tokenizer),
        "over_max_length": _over(scan, before, read, config),
        "tokenizer": None if tokenizer is None else _tokenizer(tokenizer),
        "settings": config.to_dict(),
    }


def _strata(plan: Plan, lengths: NDArray[np.int32]) -> list[dict[str, Any]]:
    found = []
    for number, (source, _) in enumerate(plan.stratum_names[: len(plan.split.rows)]):
        within = lengths[plan.strata == number]
        if len(within):
            found.append(
                {
                    "source": source,
                    "shortest": int(within.min()),
                    "longest": int(within.max()),
                    "rows": int(plan.split.rows[number]),
                    "due": int(plan.split.wanted[number]),
                    "eval": int(plan.split.taken[number]),
                }
            )
    return found


def _lengths(
    before: NDArray[np.int32], after: NDArray[np.int32], held_out: NDArray[np.int32], tokenizer: Any
) -> dict[str, Any]:
    longest = int(before.max(initial=1))
    # The longest hundredth would flatten the rest; it is in the last bin.
    edges = np.unique(
        np.linspace(0, max(np.percentile(before, 99) if len(before) else 1, 1), _BINS).astype(int)
    )
    edges = np.append(edges[edges < longest], longest + 1)
    sides = {"before": before, "after": after, "eval": held_out}
    return {
        "unit": "words" if tokenizer is None else "tokens",
        "edges": edges.tolist(),
        **{name: np.histogram(values, edges)[0].tolist() for name, values in sides.items()},
        "mean": {name: float(values.mean()) if len(values) else None for name, values in sides.items()},
        "median": {name: float(np.median(values)) if len(values) else None for name, values in sides.items()},
        "max": {name: int(values.max(initial=0)) for name, values in sides.items()},
    }


def _over(
    scan: Scan, before: NDArray[np.int32], read: NDArray[np.bool_], config: PreprocessConfig
) -> dict[str, dict[str, int]]:
    """Of each source, its rows and how many of them are above `max_length`."""
    if config.max_length is None:
        return {}
    source = scan.column("source")
    return {
        name: {
            "rows": int((read & (source == number)).sum()),
            "over": int((read & (source == number) & (before > config.max_length)).sum()),
        }
        for name, number in sorted(scan.sources.items())
    }


def _tokenizer(tokenizer: Any) -> dict[str, str]:
    """Name of a tokenizer, and a hash of what decides on its tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    state += str(getattr(tokenizer, "chat_template", None))
    return {
        "name": str(getattr(tokenizer, "name_or_path", "")),
        "sha256": hashlib.sha256(state.encode("utf-8", "surrogatepass")).hexdigest(),
    }
