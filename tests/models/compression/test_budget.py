"""Which tokens fit a budget."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from raises import raises_error
from rlhf_models.compression.budget import LONGEST_UNIT, keep_best, protection, sentence_numbers


def kept(scores, budget, protected=(), units=None):
    mask = np.zeros(len(scores), dtype=bool)
    mask[list(protected)] = True
    numbers = np.arange(len(scores)) if units is None else np.array(units)
    return keep_best(np.array(scores, dtype=float), budget, protected=mask, units=numbers).tolist()


def test_the_best_tokens_are_kept_in_their_order():
    # Scores 5 and 4 are at positions 3 and 0; protected position 4 takes one of three places.
    assert kept([4, 1, 2, 5, 0], 3) == [0, 2, 3]
    assert kept([4, 1, 2, 5, 0], 3, protected=[4]) == [0, 3, 4]


def test_sentences_are_ranked_by_their_mean_and_the_last_is_cut():
    # Means: (1 + 2) / 2 = 1.5, (9 + 0 + 0) / 3 = 3, (2 + 2) / 2 = 2. The second is kept whole, then the
    # third; of the first there is room for its best token.
    assert kept([1, 2, 9, 0, 0, 2, 2], 6, units=[0, 0, 1, 1, 1, 2, 2]) == [1, 2, 3, 4, 5, 6]


def test_a_sentences_protected_tokens_do_not_count_for_it():
    # Without its protected token, the first sentence has the mean 1, the second 2.
    assert kept([9, 1, 2, 2], 3, protected=[0], units=[0, 0, 1, 1]) == [0, 2, 3]


def test_of_equal_sentences_the_later_is_kept():
    assert kept([1, 1, 1, 1], 2, units=[0, 0, 1, 1]) == [2, 3]


def test_more_protected_than_kept_is_refused():
    with raises_error("budget_too_small", protected=3, budget=2):
        kept([1, 1, 1], 2, protected=[0, 1, 2])


@settings(deadline=None)
@given(st.data())
def test_exactly_the_budget_is_kept_with_all_that_is_protected(data):
    scores = data.draw(st.lists(st.floats(-9, 9), min_size=1, max_size=40))
    protected = data.draw(st.sets(st.integers(0, len(scores) - 1)))
    budget = data.draw(st.integers(max(1, len(protected)), len(scores)))
    steps = data.draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores)))
    found = kept(scores, budget, protected, np.cumsum([0, *steps[1:]]))
    assert len(found) == budget and protected <= set(found)
    assert found == sorted(set(found))


def test_ends_and_spans_are_protected():
    found = protection(8, [(3, 4)], keep_first=1, keep_last=2)
    assert np.flatnonzero(found).tolist() == [0, 3, 6, 7]
    assert protection(2, [], keep_first=5, keep_last=5).all()
    with raises_error("invalid_span", start=7, stop=9, length=8):
        protection(8, [(7, 9)], keep_first=0, keep_last=0)


class Words:
    """A tokenizer whose tokens are given words."""

    def __init__(self, *words):
        self.words = words

    def convert_ids_to_tokens(self, ids):
        return [self.words[i] for i in ids]


def test_sentences_end_with_full_stops_before_spaces_and_with_lines():
    words = Words("It", "Ġis", "Ġ3", ".", "14", ".", "ĠSo", "Ċ", "a")
    assert sentence_numbers(words, range(9)).tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 2]
    assert sentence_numbers(words, [0]).tolist() == [0]


def test_long_sentences_are_cut():
    numbers = sentence_numbers(Words("a"), [0] * (LONGEST_UNIT + 2))
    assert np.bincount(numbers).tolist() == [LONGEST_UNIT, 2]
