"""Whether a run games its reward: the gap to a held-out reward with intervals, and hints without one."""

from rlhf_eval.audit.gap import measure_gap
from rlhf_eval.audit.hints import find_hints
from rlhf_eval.audit.report import Audit, audit_page

__all__ = [
    "Audit",
    "audit_page",
    "find_hints",
    "measure_gap",
]
