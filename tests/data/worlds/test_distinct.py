"""What holds for every world: splits, seeds, and worlds that are too small or impossible."""

import pytest

from raises import raises_error
from rlhf_data import StoryWorldConfig, SumWorldConfig, UserError, generate_stories, generate_sums, split_of


@pytest.mark.parametrize(
    ("make", "config"), [(generate_stories, StoryWorldConfig()), (generate_sums, SumWorldConfig())]
)
def test_splits_are_disjoint_distinct_and_repeatable(make, config):
    train = make(config, 1000, split="train", seed=3)
    held_out = make(config, 1000, split="eval", seed=3)
    assert len({r.story for r in train} | {r.story for r in held_out}) == 2000
    assert {split_of(r.story) for r in train} == {"train"}
    assert {split_of(r.story) for r in held_out} == {"eval"}
    assert make(config, 1000, split="train", seed=3) == train
    assert make(config, 1000, split="train", seed=4) != train
    assert make(config, 10, split="train", seed=3) == train[:10]


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (StoryWorldConfig, {"min_sentences": 5, "max_sentences": 4}, "min_sentences 5 is above max_sent"),
        (StoryWorldConfig, {"num_places": 3}, "num_choices 4 is above num_places 3"),
        (StoryWorldConfig, {"hearsay_rate": 1.5}, "hearsay_rate is 1.5, expected a value >= 0 and <= 1"),
        (SumWorldConfig, {"max_amount": 3}, "max_amount is 3, expected a value >= 4"),
    ],
)
def test_impossible_worlds_are_refused(kind, values, message):
    with pytest.raises(UserError, match=message):
        kind.from_dict(values)


@pytest.mark.parametrize(
    ("make", "config", "count"),
    [
        (
            generate_stories,
            StoryWorldConfig(num_movers=2, num_places=3, num_choices=3, min_sentences=2, max_sentences=2),
            100,
        ),
        # 8 · 7 ordered pairs of people, 8 things and the 13 pairs of amounts up to 4 that sum to 3..7.
        (generate_sums, SumWorldConfig(max_amount=4, price_rate=0), 6000),
    ],
)
def test_a_world_too_small_for_the_number_of_stories(make, config, count):
    with raises_error("too_few_records"):
        make(config, count, split="eval", seed=0)
