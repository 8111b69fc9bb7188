"""Evaluation of one model on prompts: completions, rewards, divergence from its reference.

May import the statistics, the pages and the scores of this package, and, where a function needs them, the
packages for models; imports them when it is called, so that a report without models needs none of them.
"""

from rlhf_eval.evaluation.evaluator import RLHFEvaluator as RLHFEvaluator
from rlhf_eval.evaluation.findings import evaluation_findings as evaluation_findings
from rlhf_eval.evaluation.measures import as_json as as_json
from rlhf_eval.evaluation.measures import judge_agreement as judge_agreement
from rlhf_eval.evaluation.measures import measure_against as measure_against
from rlhf_eval.evaluation.measures import measure_policy as measure_policy
from rlhf_eval.evaluation.measures import trade_off as trade_off
from rlhf_eval.evaluation.page import draw_figures as draw_figures
from rlhf_eval.evaluation.page import evaluation_page as evaluation_page
from rlhf_eval.evaluation.page import evaluation_text as evaluation_text
from rlhf_eval.evaluation.pair_judges import PairJudge as PairJudge
from rlhf_eval.evaluation.pair_judges import load_judge as load_judge
from rlhf_eval.evaluation.pair_judges import read_env_file as read_env_file
from rlhf_eval.evaluation.policies import Policy as Policy
from rlhf_eval.evaluation.policies import load_policy as load_policy
from rlhf_eval.evaluation.prompt_sets import adversarial_prompts as adversarial_prompts
from rlhf_eval.evaluation.prompt_sets import load_prompts as load_prompts
from rlhf_eval.evaluation.texts import is_refusal as is_refusal
from rlhf_eval.evaluation.written import EvalConfig as EvalConfig
from rlhf_eval.evaluation.written import Place as Place
from rlhf_eval.evaluation.written import Written as Written
from rlhf_eval.evaluation.written import prompt_ids as prompt_ids
