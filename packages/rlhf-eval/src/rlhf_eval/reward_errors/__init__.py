"""What a reward model gets wrong, on pairs or on prompts with several completions: biases, cases to read.

May import `rlhf_eval.stats`, `figures` and `html`; knows no model: it is given scores.
"""

from rlhf_eval.reward_errors.analysis import analyse_errors, best_of_n_curve
from rlhf_eval.reward_errors.candidates import TIES, ScoredCandidates, analyse_candidates, tie_of
from rlhf_eval.reward_errors.findings import (
    ErrorFinding,
    candidate_cases,
    candidate_findings,
    error_cases,
    error_findings,
)
from rlhf_eval.reward_errors.page import (
    candidates_page,
    draw_errors,
    errors_page,
    errors_text,
    subset_rows,
)
from rlhf_eval.reward_errors.scored_pairs import ScoredPairs

__all__ = [
    "TIES",
    "ErrorFinding",
    "ScoredCandidates",
    "ScoredPairs",
    "analyse_candidates",
    "analyse_errors",
    "best_of_n_curve",
    "candidate_cases",
    "candidate_findings",
    "candidates_page",
    "draw_errors",
    "error_cases",
    "error_findings",
    "errors_page",
    "errors_text",
    "subset_rows",
    "tie_of",
]
