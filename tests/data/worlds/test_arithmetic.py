"""Records of additions: right is right, wrong is what careless people make of it, and splits share none."""

import pytest

from raises import raises_error
from rlhf_data import arithmetic_records
from rlhf_data.worlds.arithmetic import careless

_KINDS = ("sft", "preference", "prompt")


def _numbers(text, spaced=True):
    """The numbers of a text whose digits are written apart, or not."""
    assert not spaced or all(len(word) == 1 for word in text.split())
    return [int(part.replace(" ", "")) for part in text.strip(" =").split("+")]


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("spaced", [True, False])
def test_splits_share_no_addition_and_seeds_repeat(kind, spaced):
    train = arithmetic_records(kind, 400, split="train", seed=1, spaced=spaced)
    other = arithmetic_records(kind, 400, split="eval", seed=2, spaced=spaced)
    assert len({record.prompt for record in train}) == len(train) == 400
    assert not {record.prompt for record in train} & {record.prompt for record in other}
    assert arithmetic_records(kind, 400, split="train", seed=1, spaced=spaced) == train
    assert arithmetic_records(kind, 400, split="train", seed=3, spaced=spaced) != train


def test_all_kinds_and_both_ways_of_writing_hold_the_same_additions():
    records = [
        arithmetic_records(kind, 50, split="train", seed=4, spaced=spaced)
        for kind in _KINDS
        for spaced in (True, False)
    ]
    for same in zip(*records, strict=True):
        assert len({record.prompt.replace(" ", "") for record in same}) == 1


def test_answers_are_sums_written_as_asked():
    for spaced in (True, False):
        for record in arithmetic_records("sft", 300, split="train", seed=0, spaced=spaced):
            assert record.prompt.endswith(" =") and record.completion.startswith(" ")
            first, second = _numbers(record.prompt, spaced)
            assert _numbers(record.completion, spaced) == [first + second]
            assert all(10 <= number <= 99 for number in (first, second, first + second))
    plain = arithmetic_records("sft", 1, split="train", seed=0, spaced=False)[0]
    apart = arithmetic_records("sft", 1, split="train", seed=0)[0]
    assert (
        plain.prompt.split() == apart.prompt.replace(" ", "").replace("+", " + ").replace("=", " =").split()
    )


def test_wrong_answers_are_off_by_ten():
    below = 0
    records = arithmetic_records("preference", 500, split="train", seed=0)
    for record in records:
        first, second = _numbers(record.prompt)
        assert _numbers(record.chosen) == [first + second]
        (wrong,) = _numbers(record.rejected)
        assert wrong == careless(first, second)
        assert abs(wrong - first - second) == 10 and 10 <= wrong <= 99
        below += wrong < first + second
    # 45% of two digits carry, and where they do not, a sum above 89 cannot be ten more
    assert 0.4 < below / len(records) < 0.6


def test_careless_sums():
    assert careless(17, 25) == 32  # 7 + 5 = 12: the one is not carried
    assert careless(15, 25) == 30  # 5 + 5 = 10 carries too
    assert careless(14, 25) == 49  # nothing to carry: ten too many
    assert careless(54, 35) == 99  # the largest there is
    assert careless(54, 36) == 80  # 4 + 6 = 10
    assert careless(51, 40) == 81  # 101 has three digits


def test_prompts_have_the_answer_as_it_is_to_be_written():
    for record in arithmetic_records("prompts", 100, split="eval", seed=0):
        assert record.columns == {"answer": " ".join(str(sum(_numbers(record.prompt))))}
    for record in arithmetic_records("prompt", 100, split="eval", seed=0, spaced=False):
        assert record.columns == {"answer": str(sum(_numbers(record.prompt, spaced=False)))}


def test_the_whole_split_and_no_more():
    sizes: dict[str, int] = {}
    for split in ("train", "eval"):
        with raises_error("too_few_records") as caught:
            arithmetic_records("sft", 9999, split=split, seed=0)
        sizes[split] = int(str(caught.value).split("only ")[1].split()[0])
        assert len(arithmetic_records("sft", sizes[split], split=split, seed=0)) == sizes[split]
    # of the pairs from 10 to 99 whose sum is at most 99: 1 + 2 + ... + 80
    assert sizes == {"train": 2246, "eval": 3240 - 2246}
    assert arithmetic_records("sft", 0, split="train", seed=0) == []


@pytest.mark.parametrize("kind", ["kto", ""])
def test_unknown_kinds(kind):
    with raises_error("unknown_kind"):
        arithmetic_records(kind, 1, split="train", seed=0)
