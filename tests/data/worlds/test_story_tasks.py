"""Records of the story world: right is right, wrong is wrong, and the splits share no story."""

import pytest

from raises import raises_error
from rlhf_data import StepDataset, StoryWorldConfig, story_records
from rlhf_data.worlds.story import sentence_kind, sentence_place, split_sentences

_KINDS = ("sft", "preference", "kto", "steps", "step_pairs", "prompts")


def _story(record):
    return record.prompt.split(" where is ")[0]


def _truth(record):
    seen = [s for s in split_sentences(_story(record)) if sentence_kind(s) == "observation"]
    return sentence_place(seen[-1])


def _claim(completion):
    assert completion.strip().startswith("it is ") and completion.endswith(" .")
    return completion.strip()[len("it is ") : -2]


@pytest.mark.parametrize("kind", _KINDS)
def test_splits_share_no_story_and_seeds_repeat(kind):
    train = story_records(kind, 200, split="train", seed=1)
    other = story_records(kind, 200, split="eval", seed=2)
    assert len({_story(record) for record in train}) == len(train) == 200
    assert not {_story(record) for record in train} & {_story(record) for record in other}
    assert story_records(kind, 200, split="train", seed=1) == train
    assert story_records(kind, 200, split="train", seed=3) != train


def test_demonstrations_are_right():
    for record in story_records("sft", 200, split="train", seed=0):
        assert _claim(record.completion) == _truth(record)


def test_preferences_prefer_what_is_right():
    records = story_records("preference", 400, split="train", seed=0)
    gossip = 0
    for record in records:
        assert _claim(record.chosen) == _truth(record) != _claim(record.rejected)
        assert f" {_claim(record.rejected)} " in record.prompt.replace("\n", " ")
        gossip += split_sentences(_story(record))[-1] == f"gossip says in {_claim(record.rejected)} ."
    # the share of stories that end in gossip, 0.73, times the share of wrong answers that believe it: 0.7,
    # and a third of the others
    assert 0.5 < gossip / len(records) < 0.68


def test_labels_tell_the_truth_and_are_balanced():
    records = story_records("kto", 400, split="train", seed=0)
    for record in records:
        assert record.label == (_claim(record.completion) == _truth(record))
    assert 0.43 < sum(record.label for record in records) / len(records) < 0.57


def _step_truths(record, steps):
    """Whether each step's claim agrees with what was last seen by then."""
    truths, seen = [], None
    for sentence, step in zip(split_sentences(_story(record)), steps, strict=False):
        assert step.startswith(sentence)
        seen = sentence_place(sentence) if sentence_kind(sentence) == "observation" else seen
        truths.append(float(step.endswith(f" is in {seen} .")))
    return (*truths, float(_claim(steps[-1]) == seen))


def test_steps_are_labelled_by_the_truth_of_their_claim():
    records = story_records("steps", 300, split="train", seed=0)
    for record in records:
        assert len(record.completions) == len(split_sentences(_story(record))) + 1
        assert record.labels == _step_truths(record, record.completions)
    labels = [label for record in records for label in record.labels]
    assert 0.6 < sum(labels) / len(labels) < 0.9
    final = [record.labels[-1] for record in records]
    assert 0.5 < sum(final) / len(final) < 0.75


def test_pairs_of_solutions_have_one_right_answer():
    for record in story_records("step_pairs", 300, split="eval", seed=0):
        assert record.chosen_labels == _step_truths(record, record.chosen) == (1.0,) * len(record.chosen)
        assert record.rejected_labels == _step_truths(record, record.rejected)
        assert record.rejected_labels[-1] == 0.0


def test_prompts_come_with_what_judges_an_answer():
    demonstrations = story_records("sft", 100, split="eval", seed=5)
    for record, shown in zip(
        story_records("prompts", 100, split="eval", seed=5), demonstrations, strict=True
    ):
        assert record.prompt == shown.prompt
        assert set(record.columns) == {"answer", "choices", "last_place"}
        assert record.columns["answer"] == _truth(record) == _claim(shown.completion)
        assert record.columns["last_place"] == sentence_place(split_sentences(_story(record))[-1])
        assert record.prompt.endswith(f" ? {' | '.join(record.columns['choices'])}\nanswer:")
        assert record.columns["answer"] in record.columns["choices"]


def test_the_world_can_be_chosen(tokenizer):
    config = StoryWorldConfig(num_places=3, num_choices=2, min_sentences=2, max_sentences=2)
    records = story_records("steps", 20, split="train", seed=0, config=config)
    assert {len(record.completions) for record in records} == {3}
    assert len(StepDataset(records, tokenizer)) == 20


@pytest.mark.parametrize("kind", ["dpo", ""])
def test_unknown_kinds(kind):
    with raises_error("unknown_kind"):
        story_records(kind, 1, split="train", seed=0)
