"""One model on prompts: what it writes, what that is worth, how far it is from its reference.

May import the statistics, the pages and the scores of this package, and, where a function needs them, the
packages for models; imports them when it is called, so that a report without models needs none of them.
"""

from rlhf_eval.evaluation.evaluator import RLHFEvaluator
from rlhf_eval.evaluation.findings import evaluation_findings
from rlhf_eval.evaluation.measures import as_json, judge_agreement, measure_against, measure_policy, trade_off
from rlhf_eval.evaluation.page import draw_figures, evaluation_page, evaluation_text
from rlhf_eval.evaluation.pair_judges import PairJudge, load_judge, read_env_file
from rlhf_eval.evaluation.policies import load_policy
from rlhf_eval.evaluation.prompt_sets import adversarial_prompts, load_prompts
from rlhf_eval.evaluation.texts import is_refusal
from rlhf_eval.evaluation.written import EvalConfig, Place, Written, prompt_ids

__all__ = [
    "EvalConfig",
    "PairJudge",
    "Place",
    "RLHFEvaluator",
    "Written",
    "adversarial_prompts",
    "as_json",
    "draw_figures",
    "evaluation_findings",
    "evaluation_page",
    "evaluation_text",
    "is_refusal",
    "judge_agreement",
    "load_judge",
    "load_policy",
    "load_prompts",
    "measure_against",
    "measure_policy",
    "prompt_ids",
    "read_env_file",
    "trade_off",
]
