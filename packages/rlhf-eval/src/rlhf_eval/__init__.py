"""Metrics, training curves and pages for runs of every method."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_eval.curves import metric_keys as metric_keys
    from rlhf_eval.curves import training_curves as training_curves
    from rlhf_eval.debug_plots import activation_figure as activation_figure
    from rlhf_eval.debug_plots import gradient_flow_figure as gradient_flow_figure
    from rlhf_eval.figures import can_draw as can_draw
    from rlhf_eval.metrics import auroc as auroc
    from rlhf_eval.metrics import balanced_accuracy as balanced_accuracy
    from rlhf_eval.metrics import brier_score as brier_score
    from rlhf_eval.metrics import expected_calibration_error as expected_calibration_error
    from rlhf_eval.metrics import rate as rate
    from rlhf_eval.metrics import true_negative_rate as true_negative_rate
    from rlhf_eval.metrics import true_positive_rate as true_positive_rate
    from rlhf_eval.side_by_side import samples_page as samples_page

_MODULES = {
    "curves": ("metric_keys", "training_curves"),
    "debug_plots": ("activation_figure", "gradient_flow_figure"),
    "figures": ("can_draw",),
    "metrics": (
        *("auroc", "balanced_accuracy", "brier_score", "expected_calibration_error"),
        *("rate", "true_negative_rate", "true_positive_rate"),
    ),
    "side_by_side": ("samples_page",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)

_MOVED = ("minmax_figure", "write_minmax_report")
"""To rlhf_minmax; found here too in 0.x, where it is installed."""


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        return getattr(import_module("rlhf_minmax"), name)
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
