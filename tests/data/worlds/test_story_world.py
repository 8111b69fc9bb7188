from rlhf_data import StoryWorldConfig, generate_stories
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
