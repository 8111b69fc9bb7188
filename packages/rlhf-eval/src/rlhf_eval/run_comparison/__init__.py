"""Training runs side by side: stability, convergence, efficiency, quality, on numpy alone."""

from rlhf_eval.run_comparison.groups import Pair as Pair
from rlhf_eval.run_comparison.groups import compare_pairs as compare_pairs
from rlhf_eval.run_comparison.groups import summarise_group as summarise_group
from rlhf_eval.run_comparison.measures import FRACTION as FRACTION
from rlhf_eval.run_comparison.measures import HOLD as HOLD
from rlhf_eval.run_comparison.measures import WINDOW as WINDOW
from rlhf_eval.run_comparison.measures import final_mean as final_mean
from rlhf_eval.run_comparison.runs import Curve as Curve
from rlhf_eval.run_comparison.runs import RunCurves as RunCurves
from rlhf_eval.run_comparison.runs import matched_kl as matched_kl
from rlhf_eval.run_comparison.runs import measure_run as measure_run
from rlhf_eval.run_comparison.runs import metric_over_kl as metric_over_kl
from rlhf_eval.run_comparison.runs import shared_threshold as shared_threshold
from rlhf_eval.run_comparison.runs import smoothed as smoothed
