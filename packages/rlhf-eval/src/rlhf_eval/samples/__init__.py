"""Completions of several models side by side: read, matched by prompt, selected, written."""

from rlhf_eval.samples.export import FORMATS as FORMATS
from rlhf_eval.samples.select import select_cases as select_cases
from rlhf_eval.samples.sources import matched as matched
from rlhf_eval.samples.sources import read_source as read_source
