"""Pairs by the values of a column, such as the source they are from: measured, compared, shown."""

from rlhf_eval.exploration.subsets.measured import SubsetColumn, measure_subsets
from rlhf_eval.exploration.subsets.shown import draw_subsets, subsets_section
from rlhf_eval.exploration.subsets.told import subset_sentences

__all__ = ["SubsetColumn", "draw_subsets", "measure_subsets", "subset_sentences", "subsets_section"]
