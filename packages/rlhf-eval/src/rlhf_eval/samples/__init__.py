"""Completions of several models side by side: read, matched by prompt, selected, written."""

from rlhf_eval.samples.export import FORMATS
from rlhf_eval.samples.select import select_cases
from rlhf_eval.samples.sources import matched, read_source

__all__ = [
    "FORMATS",
    "matched",
    "read_source",
    "select_cases",
]
