"""Near duplicates: planted ones are found, others are not, and the order of the texts makes no difference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raises import raises_error
from rlhf_data import near_duplicate_groups

VOCABULARY = [f"word{number}" for number in range(5000)]


def words(random: np.random.Generator, count: int) -> list[str]:
    return [VOCABULARY[i] for i in random.integers(0, len(VOCABULARY), count)]


def partition(groups: np.ndarray, names: list[int]) -> set[frozenset[int]]:
    members: dict[int, set[int]] = {}
    for group, name in zip(groups.tolist(), names, strict=True):
        members.setdefault(group, set()).add(name)
    return set(map(frozenset, members.values()))


def test_groups_are_named_after_their_first_member() -> None:
    a, b = "one two three four five six seven", "seven six five four three two one"
    groups = near_duplicate_groups(
        [a, b, a.upper() + "!", "  " + b, "", "  ", "yes", "Yes.", "no", "🙂", "🙁"]
    )
    assert groups.dtype == np.int64
    assert groups.tolist() == [0, 1, 0, 1, 4, 4, 6, 6, 8, 9, 10]
    assert near_duplicate_groups([]).tolist() == []


def test_the_threshold_is_that_of_the_jaccard_index() -> None:
    # 24 words have 20 shingles of 5.  One more word at the end: 20 shared of 21 = .952; five more: 20 of 25.
    text = [f"w{number}" for number in range(24)]
    longer = [" ".join(text + [f"x{number}" for number in range(more)]) for more in (0, 1, 5, 6)]
    assert near_duplicate_groups([longer[0], longer[2]], threshold=0.8, permutations=512).tolist() == [0, 0]
    assert near_duplicate_groups([longer[0], longer[3]], threshold=0.8, permutations=512).tolist() == [0, 1]
    assert near_duplicate_groups([longer[0], longer[1]], threshold=1).tolist() == [0, 1]
    assert near_duplicate_groups([longer[0]] * 2, threshold=1).tolist() == [0, 0]


@pytest.mark.parametrize(("unit", "length"), [("words", 60), ("words", 700), ("characters", 60)])
def test_planted_near_duplicates_are_found_and_nothing_else(unit: str, length: int) -> None:
    random = np.random.default_rng(0)
    originals = [words(random, length) for _ in range(400)]
    copies = []
    for text in originals[:200]:
        at = int(random.integers(length))
        copies.append([*text[:at], "changed", *text[at + 1 :]])  # 5 shingles of 56 change: J >= .83
    texts = [" ".join(text) for text in (*originals, *copies)]
    groups = near_duplicate_groups(texts, unit=unit)  # pyright: ignore[reportArgumentType]
    found = sum(groups[400 + i] == i for i in range(200))
    assert found >= 196
    assert all(group in (i, i - 400) for i, group in enumerate(groups))


def test_texts_without_spaces_are_compared_by_characters() -> None:
    text = "今日はとても良い天気なので公園まで散歩に行って写真をたくさん撮りました"
    other = "昨日は一日中ひどい雨だったから家で本を読んだり料理をしたりして過ごした"
    groups = near_duplicate_groups([text, text[:-1], other], unit="characters")
    assert groups.tolist() == [0, 0, 2]
    assert near_duplicate_groups([text, text[:-1], other]).tolist() == [0, 1, 2]


def test_many_similar_texts_in_one_bucket_become_one_group() -> None:
    start = " ".join(f"w{number}" for number in range(60))
    groups = near_duplicate_groups([f"{start} {number}" for number in range(300)])
    assert set(groups.tolist()) == {0}


def test_half_shared_texts_stay_apart_however_many_they_are() -> None:
    start = " ".join(f"w{number}" for number in range(34))
    random = np.random.default_rng(1)
    texts = [f"{start} {' '.join(words(random, 20))}" for _ in range(300)]  # J = 30 / 70
    assert near_duplicate_groups(texts).tolist() == list(range(300))


def test_a_chain_is_one_group() -> None:
    text = [f"w{number}" for number in range(60)]
    chain = [" ".join(text[start : start + 40]) for start in range(0, 20, 2)]  # neighbours: 34 of 38
    assert set(near_duplicate_groups(chain).tolist()) == {0}
    assert near_duplicate_groups([chain[0], chain[-1]]).tolist() == [0, 1]


TEXT = st.lists(st.sampled_from("abcdefgh"), max_size=12).map(" ".join)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(TEXT, max_size=25), st.randoms(use_true_random=False), st.sampled_from(["words", "characters"])
)
def test_the_order_of_the_texts_makes_no_difference(texts: list[str], random, unit) -> None:
    order = list(range(len(texts)))
    random.shuffle(order)
    options = {"unit": unit, "size": 2, "threshold": 0.6}
    one = near_duplicate_groups(texts, **options)
    other = near_duplicate_groups([texts[i] for i in order], **options)
    assert partition(one, list(range(len(texts)))) == partition(other, order)
    assert all(one[group] == group <= i for i, group in enumerate(one))
    first: dict[str, int] = {}
    assert all(one[first.setdefault(text, i)] == one[i] for i, text in enumerate(texts))


def naive(texts: list[str], threshold: float) -> list[int]:
    """Every pair of shingle sets compared as sets."""
    sets = []
    for text in texts:
        units = text.split() or [""]
        units += ["<pad>"] * (2 - len(units))
        sets.append({tuple(units[i : i + 2]) for i in range(len(units) - 1)})
    groups = list(range(len(texts)))
    for i in range(len(texts)):
        for j in range(i):
            if len(sets[i] & sets[j]) / len(sets[i] | sets[j]) >= threshold:
                low, high = sorted((groups[i], groups[j]))
                groups = [low if group == high else group for group in groups]
    return groups


@settings(max_examples=25, deadline=None)
@given(st.lists(TEXT, max_size=15), st.sampled_from([0.5, 0.75, 1.0]))
def test_the_same_groups_as_of_every_pair_compared(texts: list[str], threshold: float) -> None:
    found = near_duplicate_groups(texts, size=2, threshold=threshold, permutations=512)
    assert found.tolist() == naive(texts, threshold)


@pytest.mark.parametrize(
    ("key", "value"),
    [("threshold", 0), ("threshold", 1.5), ("unit", "tokens"), ("size", 0), ("permutations", 0)],
)
def test_settings_out_of_range_are_refused(key: str, value) -> None:
    with raises_error("invalid_value", key=key):
        near_duplicate_groups(["a"], **{key: value})
