"""Preference data before training: lengths, duplicates, leaks, shortcuts to the label, wrong labels.

Pure statistics over columns and words of pairs, with figures and a page; files are read by others.
"""

from rlhf_eval.exploration.analysis import Exploration as Exploration
from rlhf_eval.exploration.analysis import choose_samples as choose_samples
from rlhf_eval.exploration.analysis import explore_pairs as explore_pairs
from rlhf_eval.exploration.figures import draw_figures as draw_figures
from rlhf_eval.exploration.hygiene import ROW_RULES as ROW_RULES
from rlhf_eval.exploration.page import exploration_page as exploration_page
from rlhf_eval.exploration.pair_table import PairTable as PairTable
from rlhf_eval.exploration.pair_table import columns_of_pairs as columns_of_pairs
from rlhf_eval.exploration.pair_table import folded as folded
from rlhf_eval.exploration.pair_texts import PairTexts as PairTexts
from rlhf_eval.exploration.pair_texts import pair_texts as pair_texts
from rlhf_eval.exploration.sentences import sentences as sentences
from rlhf_eval.exploration.shortcuts import length_unit as length_unit
from rlhf_eval.exploration.shortcuts import surface_differences as surface_differences
from rlhf_eval.exploration.subsets import SubsetColumn as SubsetColumn
from rlhf_eval.exploration.subsets import subset_sentences as subset_sentences
from rlhf_eval.exploration.words import PairWords as PairWords
from rlhf_eval.exploration.words import WordCounter as WordCounter
from rlhf_eval.exploration.words import WordTable as WordTable
from rlhf_eval.exploration.words import words_of_pairs as words_of_pairs
