"""Metrics, plots and HTML reports for RLHF runs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_eval.curves import metric_keys as metric_keys
    from rlhf_eval.curves import training_curves as training_curves
    from rlhf_eval.debug_plots import activation_figure as activation_figure
    from rlhf_eval.debug_plots import gradient_flow_figure as gradient_flow_figure
    from rlhf_eval.metrics import auroc as auroc
    from rlhf_eval.metrics import balanced_accuracy as balanced_accuracy
    from rlhf_eval.metrics import brier_score as brier_score
    from rlhf_eval.metrics import expected_calibration_error as expected_calibration_error
    from rlhf_eval.metrics import rate as rate
    from rlhf_eval.metrics import true_negative_rate as true_negative_rate
    from rlhf_eval.metrics import true_positive_rate as true_positive_rate
    from rlhf_eval.plots import minmax_figure as minmax_figure
    from rlhf_eval.report import write_minmax_report as write_minmax_report
    from rlhf_eval.side_by_side import samples_page as samples_page

_MODULES = {
    "activation_figure": "debug_plots",
    "auroc": "metrics",
    "balanced_accuracy": "metrics",
    "brier_score": "metrics",
    "expected_calibration_error": "metrics",
    "gradient_flow_figure": "debug_plots",
    "metric_keys": "curves",
    "minmax_figure": "plots",
    "rate": "metrics",
    "samples_page": "side_by_side",
    "training_curves": "curves",
    "true_negative_rate": "metrics",
    "true_positive_rate": "metrics",
    "write_minmax_report": "report",
}

__all__ = [
    "activation_figure",
    "auroc",
    "balanced_accuracy",
    "brier_score",
    "expected_calibration_error",
    "gradient_flow_figure",
    "metric_keys",
    "minmax_figure",
    "rate",
    "training_curves",
    "true_negative_rate",
    "true_positive_rate",
    "write_minmax_report",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
