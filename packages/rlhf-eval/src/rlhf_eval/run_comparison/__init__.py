"""Training runs side by side: stability, convergence, efficiency, quality, on numpy alone."""

from rlhf_eval.run_comparison.groups import Pair, compare_pairs, summarise_group
from rlhf_eval.run_comparison.measures import FRACTION, HOLD, WINDOW, final_mean
from rlhf_eval.run_comparison.runs import (
    Curve,
    RunCurves,
    matched_kl,
    measure_run,
    shared_threshold,
    smoothed,
)

__all__ = [
    "FRACTION",
    "HOLD",
    "WINDOW",
    "Curve",
    "Pair",
    "RunCurves",
    "compare_pairs",
    "final_mean",
    "matched_kl",
    "measure_run",
    "shared_threshold",
    "smoothed",
    "summarise_group",
]
