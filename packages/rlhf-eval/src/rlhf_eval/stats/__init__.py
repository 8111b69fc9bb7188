"""Statistics of evaluations, on numpy alone: intervals that cover, exact tests, and what they resample."""

from rlhf_eval.stats.classification import (
    auroc,
    balanced_accuracy,
    brier_score,
    debiased_calibration_error,
    equal_count_calibration_error,
    expected_calibration_error,
    rate,
    true_negative_rate,
    true_positive_rate,
)
from rlhf_eval.stats.controlled import (
    ControlledWinRate,
    alpaca_eval_win_rate,
    controlled_win_rate,
    length_feature,
    style_counts,
    style_features,
)
from rlhf_eval.stats.differences import (
    mean_interval,
    mean_of_parts,
    non_inferior,
    paired_difference,
    proportion_interval,
    two_sample_difference,
    verdict_difference,
    wilson,
)
from rlhf_eval.stats.fronts import (
    hypervolume,
    pareto_front,
)
from rlhf_eval.stats.interval import Interval
from rlhf_eval.stats.judges import (
    cohen_kappa,
    corrected_rate,
    prediction_powered,
)
from rlhf_eval.stats.seeds import (
    iqm,
    iqm_interval,
    probability_of_improvement,
)
from rlhf_eval.stats.significance import (
    benjamini_hochberg,
    detectable_difference,
    detectable_rate,
    holm,
    mcnemar,
    paired_power,
    sign_test,
    units_needed,
)
from rlhf_eval.stats.win_rates import (
    JudgeOrder,
    bradley_terry,
    position_bias,
    win_rate,
)

__all__ = [
    "ControlledWinRate",
    "Interval",
    "JudgeOrder",
    "alpaca_eval_win_rate",
    "auroc",
    "balanced_accuracy",
    "benjamini_hochberg",
    "bradley_terry",
    "brier_score",
    "cohen_kappa",
    "controlled_win_rate",
    "corrected_rate",
    "debiased_calibration_error",
    "detectable_difference",
    "detectable_rate",
    "equal_count_calibration_error",
    "expected_calibration_error",
    "holm",
    "hypervolume",
    "iqm",
    "iqm_interval",
    "length_feature",
    "mcnemar",
    "mean_interval",
    "mean_of_parts",
    "non_inferior",
    "paired_difference",
    "paired_power",
    "pareto_front",
    "position_bias",
    "prediction_powered",
    "probability_of_improvement",
    "proportion_interval",
    "rate",
    "sign_test",
    "style_counts",
    "style_features",
    "true_negative_rate",
    "true_positive_rate",
    "two_sample_difference",
    "units_needed",
    "verdict_difference",
    "wilson",
    "win_rate",
]
