import pytest

from rlhf_data import StoryWorldConfig, UserError, generate_stories, split_of
from rlhf_data.worlds.story import (
    hearsay,
    movers,
    observation,
    places,
    sentence_kind,
    sentence_place,
    split_sentences,
)

_CONFIG = StoryWorldConfig()


def test_gold_is_the_last_observed_place_and_the_lure_the_last_named():
    for record in generate_stories(_CONFIG, 500, split="train", seed=1):
        sentences = split_sentences(record.story)
        assert 3 <= len(sentences) <= 6
        assert " ".join(sentences) == record.story
        assert sentence_kind(sentences[0]) == "observation"
        observed = [sentence_place(s) for s in sentences if sentence_kind(s) == "observation"]
        assert record.answer_text == observed[-1]
        assert record.extra["last_place"] == sentence_place(sentences[-1])
        assert (record.answer_text == record.extra["last_place"]) == (
            sentence_kind(sentences[-1]) == "observation"
        )
        assert record.question == f"where is {record.extra['mover']} ?"
        assert len(set(record.choices)) == 4 and {record.answer_text, record.extra["last_place"]} <= {
            *record.choices
        }


def test_rates_and_names_follow_the_config():
    records = generate_stories(_CONFIG, 3000, split="train", seed=2)
    lured = sum(r.extra["last_place"] != r.answer_text for r in records) / len(records)
    assert abs(lured - 0.73) < 0.03
    assert {r.extra["mover"] for r in records} == set(movers(_CONFIG)) and len(movers(_CONFIG)) == 8
    assert {r.answer_text for r in records} == set(places(_CONFIG)) and len(places(_CONFIG)) == 8
    assert {r.answer for r in records} == {0, 1, 2, 3}
    easy = StoryWorldConfig(hearsay_rate=0, inner_hearsay_rate=0)
    assert all("gossip" not in r.story for r in generate_stories(easy, 50, split="train", seed=0))


def test_splits_are_disjoint_distinct_and_repeatable():
    train = generate_stories(_CONFIG, 1000, split="train", seed=3)
    held_out = generate_stories(_CONFIG, 1000, split="eval", seed=3)
    assert len({r.story for r in train} | {r.story for r in held_out}) == 2000
    assert {split_of(r.story) for r in train} == {"train"} and {split_of(r.story) for r in held_out} == {
        "eval"
    }
    assert generate_stories(_CONFIG, 1000, split="train", seed=3) == train
    assert generate_stories(_CONFIG, 1000, split="train", seed=4) != train
    assert generate_stories(_CONFIG, 10, split="train", seed=3) == train[:10]


def test_sentences():
    assert observation("mary", "kitchen") == "mary went to kitchen ."
    assert observation("ball", "shed") == "ball moved to shed ."
    assert (
        sentence_kind(hearsay("garden")) == "hearsay"
        and sentence_place("gossip says in garden .") == "garden"
    )
    assert sentence_place("mary went to kitchen") == "kitchen"
    for text in ("", "mary is here .", "mary went to kitchen . ball moved to shed .", "gossip says in"):
        assert sentence_kind(text) is None and sentence_place(text) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_sentences": 5, "max_sentences": 4}, "min_sentences 5 is above max_sentences 4"),
        ({"num_places": 3}, "num_choices 4 is above num_places 3"),
        ({"hearsay_rate": 1.5}, "hearsay_rate is 1.5, expected a value >= 0 and <= 1"),
    ],
)
def test_impossible_worlds_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        StoryWorldConfig.from_dict(values)


def test_world_too_small_for_the_number_of_stories():
    config = StoryWorldConfig(num_movers=2, num_places=3, num_choices=3, min_sentences=2, max_sentences=2)
    with pytest.raises(UserError, match="of 100 distinct eval stories"):
        generate_stories(config, 100, split="eval", seed=0)
