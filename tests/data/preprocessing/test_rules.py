"""Ties and stratified splits of records."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raises import raises_error
from rlhf_data import CompletionRecord, PreferenceRecord, completion_similarity, settle_ties, stratified_split
from rlhf_data.preprocessing.splits import connected, quantile_bins, split_groups


def test_similarity_is_dices_index_of_word_trigrams() -> None:
    # a b c d: abc bcd; a b c e: abc bce.  2 * 1 / 4.
    assert completion_similarity("a b c d", "a b c e") == 0.5
    # as a multiset: aaa twice against aaa three times, 2 * 2 / 5
    assert completion_similarity("a a a a", "a a a a a") == 0.8
    assert completion_similarity(" Yes,\n it is", "yes, it IS ") == 1
    assert completion_similarity("yes", "no") == 0
    assert completion_similarity("", "") == 1
    assert completion_similarity([{"role": "assistant", "content": "a b c d"}], "a b c e") == 0.5
    assert completion_similarity("a b c d", "a b c e f g h", at_least=0.9) == 0


def test_ties_are_kept_left_out_or_without_margin() -> None:
    text = " ".join(map(str, range(50)))
    records = [
        PreferenceRecord("p", f"{text} end", f"{text} end.", margin=2.0, where="f, line 1"),  # 48 of 49
        PreferenceRecord("p", "Yes. ", " yes.", where="f, line 2"),
        PreferenceRecord("p", "yes", "no", margin=1.0),
    ]
    assert settle_ties(records, "keep") == (records, [])
    assert settle_ties(records, "drop") == (records[2:], ["f, line 1", "f, line 2"])
    assert [record.margin for record in settle_ties(records, "margin0")[0]] == [0, 0, 1]
    with raises_error("invalid_value", key="ties"):
        settle_ties([CompletionRecord("a", "b")], "drop")


def test_quantile_bins_are_about_equally_full_and_keep_equal_values_together() -> None:
    bins, edges = quantile_bins(np.array([5, 1, 3, 3, 3, 9, 7, 8]), 4)
    assert edges == [3, 5, 8]  # of 1 3 3 3 5 7 8 9 those at 2, 4 and 6
    assert bins.tolist() == [2, 0, 1, 1, 1, 3, 2, 3]


def test_connected_joins_over_every_key() -> None:
    found = connected(np.array([1, 2, 3, 1, 5]), np.array([7, 8, 8, 9, 9]))
    assert found.tolist() == [0, 1, 1, 0, 0]


ROWS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.sampled_from([0.0, 0.1, 0.25, 0.5]), st.randoms(use_true_random=False))
def test_no_group_is_on_two_sides_and_the_order_makes_no_difference(
    rows: Any, fraction: float, random: Any
) -> None:
    groups, strata = (np.array(column) for column in zip(*rows, strict=True))
    hashes = np.arange(len(rows), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    split = split_groups(groups, strata, fraction, hashes)
    assert not set(groups[split.held_out]) & set(groups[~split.held_out])
    assert (split.taken <= split.wanted).all()
    assert (abs(split.wanted - split.rows * fraction) < 1).all()
    assert split.wanted.sum() == round(len(rows) * fraction)
    order = list(range(len(rows)))
    random.shuffle(order)
    again = split_groups(groups[order], strata[order], fraction, hashes[order])
    assert again.held_out.tolist() == split.held_out[order].tolist()


@pytest.mark.parametrize("seed", [0, 1])
def test_strata_of_single_rows_are_met_exactly(seed: int) -> None:
    strata = np.repeat([0, 1, 2], [33, 50, 17])
    hashes = np.random.default_rng(seed).integers(0, 1 << 63, 100).astype(np.uint64)
    split = split_groups(np.arange(100), strata, 0.1, hashes, seed)
    assert split.taken.tolist() == [3, 5, 2]  # 3.3, 5 and 1.7 of 10


def test_a_stratified_split_has_the_lengths_of_all_and_shares_no_prompt() -> None:
    records = [
        PreferenceRecord(f"prompt {number // 2}", "word " * (number % 40 + 1), "no") for number in range(400)
    ]
    train, held_out = stratified_split(records, 0.2)
    assert (len(train), len(held_out)) == (320, 80)
    assert not {r.prompt for r in train} & {r.prompt for r in held_out}
    bins = Counter((len(r.chosen.split()) - 1) // 4 for r in held_out)
    assert set(bins.values()) == {8}
    again = stratified_split(records[::-1], 0.2)[1]
    assert sorted(r.prompt for r in again) == sorted(r.prompt for r in held_out)
    assert stratified_split(records, 0.2, seed=1)[1] != held_out
