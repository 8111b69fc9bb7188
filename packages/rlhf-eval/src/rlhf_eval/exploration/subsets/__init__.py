"""Pairs by the values of a column, such as the source they are from: measured, compared, shown."""

from rlhf_eval.exploration.subsets.measured import SubsetColumn as SubsetColumn
from rlhf_eval.exploration.subsets.measured import measure_subsets as measure_subsets
from rlhf_eval.exploration.subsets.sentences import subset_sentences as subset_sentences
from rlhf_eval.exploration.subsets.shown import draw_subsets as draw_subsets
from rlhf_eval.exploration.subsets.shown import subsets_section as subsets_section
