"""Preference data before training: lengths, duplicates, leaks, shortcuts to the label, wrong labels.

Pure statistics over columns and words of pairs, with figures and a page; files are read by others.
"""

from rlhf_eval.exploration.analysis import Exploration, explore_pairs
from rlhf_eval.exploration.figures import draw_figures
from rlhf_eval.exploration.hygiene import ROW_RULES
from rlhf_eval.exploration.page import exploration_page
from rlhf_eval.exploration.pair_table import PairTable, columns_of_pairs, folded
from rlhf_eval.exploration.pair_texts import PairTexts, pair_texts
from rlhf_eval.exploration.reading import choose_samples
from rlhf_eval.exploration.sentences import sentences
from rlhf_eval.exploration.shortcuts import length_unit, surface_differences
from rlhf_eval.exploration.subsets import SubsetColumn, subset_sentences
from rlhf_eval.exploration.words import PairWords, WordCounter, WordTable, word_table, words_of_pairs

__all__ = [
    "ROW_RULES",
    "Exploration",
    "PairTable",
    "PairTexts",
    "PairWords",
    "SubsetColumn",
    "WordCounter",
    "WordTable",
    "choose_samples",
    "columns_of_pairs",
    "draw_figures",
    "exploration_page",
    "explore_pairs",
    "folded",
    "length_unit",
    "pair_texts",
    "sentences",
    "subset_sentences",
    "surface_differences",
    "word_table",
    "words_of_pairs",
]
