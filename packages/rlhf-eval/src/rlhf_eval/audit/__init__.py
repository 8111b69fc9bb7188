"""Whether a run games its reward: the gap to a held-out reward with intervals, and hints without one."""

from rlhf_eval.audit.gap import measure_gap as measure_gap
from rlhf_eval.audit.hints import find_hints as find_hints
from rlhf_eval.audit.report import Audit as Audit
from rlhf_eval.audit.report import audit_page as audit_page
from rlhf_eval.audit.report import method_of as method_of
