"""Errors of a reward model, on pairs or on prompts with several completions: biases, cases to read.

May import `rlhf_eval.stats`, `figures` and `html`; knows no model: it is given scores.
"""

from rlhf_eval.reward_errors.analysis import analyse_errors as analyse_errors
from rlhf_eval.reward_errors.analysis import best_of_n_curve as best_of_n_curve
from rlhf_eval.reward_errors.candidates import TIES as TIES
from rlhf_eval.reward_errors.candidates import ScoredCandidates as ScoredCandidates
from rlhf_eval.reward_errors.candidates import analyse_candidates as analyse_candidates
from rlhf_eval.reward_errors.candidates import tie_of as tie_of
from rlhf_eval.reward_errors.findings import ErrorFinding as ErrorFinding
from rlhf_eval.reward_errors.findings import candidate_cases as candidate_cases
from rlhf_eval.reward_errors.findings import candidate_findings as candidate_findings
from rlhf_eval.reward_errors.findings import error_cases as error_cases
from rlhf_eval.reward_errors.findings import error_findings as error_findings
from rlhf_eval.reward_errors.page import candidates_page as candidates_page
from rlhf_eval.reward_errors.page import draw_errors as draw_errors
from rlhf_eval.reward_errors.page import errors_page as errors_page
from rlhf_eval.reward_errors.page import errors_text as errors_text
from rlhf_eval.reward_errors.page import subset_rows as subset_rows
from rlhf_eval.reward_errors.scored_pairs import ScoredPairs as ScoredPairs
