"""Where a run's stories come from; training and held-out stories never overlap."""

import json

import pytest

from proofs import by_default
from raises import raises_error
from rlhf_minmax import MinMaxConfig
from rlhf_minmax.formats import TextRules
from rlhf_minmax.game.report_rules import ReportRules
from rlhf_minmax.game.stories import load_stories
from rlhf_minmax.game.story_rules import StoryRules
from rlhf_minmax.game.sum_rules import SumRules

WORLDS = ["stories", "sums", "reports"]


def write(path, stories):
    rows = [{"story": s, "question": "Who?", "choices": ["Ann", "Tom"], "answer": "Tom"} for s in stories]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(**data):
    return load_stories(MinMaxConfig.from_dict({"data": data}))


@pytest.mark.parametrize(
    ("world", "rules"), [("stories", StoryRules), ("sums", SumRules), ("reports", ReportRules)]
)
@pytest.mark.parametrize("seed", by_default([0, 7], 7))
def test_a_worlds_splits_share_no_story(seed, world, rules):
    config = {"seed": seed, "data": {"world": world, "train_stories": 300, "eval_stories": 100}}
    stories = load_stories(MinMaxConfig.from_dict(config))
    train, held_out = ({r.story for r in part} for part in (stories.train, stories.held_out))
    assert (len(train), len(held_out)) == (300, 100) and not train & held_out
    assert type(stories.prompts.rules) is rules


def test_each_world_has_settings_and_models_of_its_own():
    easy = load(world="sums", train_stories=50, sum_world={"round_rate": 1})
    assert all(easy.prompts.rules.rival(record) is None for record in easy.train)
    fingerprints = [load(world=world).prompts.fingerprint() for world in WORLDS]
    assert len({tuple(each) for each in fingerprints}) == 3
    fewer = load(world="reports", train_stories=5, report_world={"num_claims": 2})
    assert all(len(record.extra["places"]) == 2 for record in fewer.train)


@pytest.mark.parametrize("world", WORLDS)
def test_a_worlds_prompt_lists_no_choices_unless_told_to(world):
    stories = load(world=world, train_stories=1, eval_stories=1)
    record = stories.train[0]
    assert stories.prompts.policy(record) == f"{record.story}\n{record.question}\nanswer:"
    own = load(train_stories=1, eval_stories=1, columns={"prompt_template": "{question} {choices}\n"})
    assert own.prompts.policy(record) == f"{record.question} {' | '.join(record.choices)}\nanswer:"


def test_equal_seeds_draw_equal_stories_and_others_do_not():
    drawn = [
        load_stories(MinMaxConfig.from_dict({"seed": s, "data": {"train_stories": 20}})) for s in (3, 3, 4)
    ]
    assert drawn[0].train == drawn[1].train and drawn[0].held_out == drawn[1].held_out
    assert drawn[0].train != drawn[2].train


def test_a_file_is_split_by_a_hash_of_the_story(tmp_path):
    names = [f"Story number {i}." for i in range(60)]
    stories = load(train_data=write(tmp_path / "a.jsonl", names))
    train, held_out = ([r.story for r in part] for part in (stories.train, stories.held_out))
    assert sorted(train + held_out) == sorted(names) and len(held_out) > 5
    # The split of a story does not depend on the rows around it.
    fewer = load(train_data=write(tmp_path / "b.jsonl", names[::-1][:40]))
    assert {r.story for r in fewer.train} <= set(train)
    assert isinstance(stories.prompts.rules, TextRules) and not isinstance(stories.prompts.rules, StoryRules)


def test_two_questions_about_one_story_stay_together(tmp_path):
    stories = load(train_data=write(tmp_path / "a.jsonl", [f"Story {i // 3}." for i in range(60)]))
    assert not {r.story for r in stories.train} & {r.story for r in stories.held_out}


def test_held_out_rows_are_taken_from_the_training_rows(tmp_path):
    train = write(tmp_path / "a.jsonl", ["One.", "Two.", "Three."])
    stories = load(train_data=train, eval_data=write(tmp_path / "b.jsonl", ["Two.", "Four."]))
    assert [r.story for r in stories.train] == ["One.", "Three."]
    assert [r.story for r in stories.held_out] == ["Two.", "Four."]


def test_evidence_that_no_critic_could_quote_is_refused_or_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"question": "Where?", "choices": ["x", "y"], "answer": "x"}
    told = [{**row, "story": f"Tom went home on day {i}.", "quote": "Tom went home on"} for i in range(20)]
    bad = {**row, "story": "Tom went home. Ann did not.", "quote": "home. Ann did not."}  # of two sentences
    path.write_text("".join(json.dumps(each) + "\n" for each in (*told, bad)))
    columns = {"evidence_column": "quote"}
    with raises_error("unfit_evidence", where=f"{path}, line 21"):
        load(train_data=str(path), columns=columns)
    stories = load(train_data=str(path), columns=columns, on_bad_row="skip")
    assert len(stories.skipped) == 1 and {r.evidence for r in stories.train} == {"Tom went home on"}
    with raises_error("missing_column", column="quotation"):
        load(train_data=str(path), columns={"evidence_column": "quotation"})


def test_limits_on_rows(tmp_path):
    path = write(tmp_path / "a.jsonl", [f"Story {i}." for i in range(60)])
    stories = load(train_data=path, train_stories=5, eval_stories=2)
    assert (len(stories.train), len(stories.held_out)) == (5, 2)


@pytest.mark.parametrize("count", [1, 2])
def test_a_file_too_small_to_split_is_refused(tmp_path, count):
    path = write(tmp_path / "a.jsonl", ["Only one."] * count)
    with raises_error("no_row_left"):
        load(train_data=path)


def test_held_out_rows_that_hold_every_story_are_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", ["One.", "Two."])
    with raises_error("no_row_left"):
        load(train_data=path, eval_data=path)


def test_a_tiny_file_with_held_out_rows_is_enough(tmp_path):
    stories = load(
        train_data=write(tmp_path / "a.jsonl", ["One."]), eval_data=write(tmp_path / "b.jsonl", ["Two."])
    )
    assert (len(stories.train), len(stories.held_out)) == (1, 1)


def test_held_out_rows_alone_are_refused(tmp_path):
    with raises_error("missing_key", key="data.train_data"):
        load(eval_data=write(tmp_path / "b.jsonl", ["Two."]))


def test_a_missing_file_is_named(tmp_path):
    with raises_error("file_not_found"):
        load(train_data=str(tmp_path / "missing.jsonl"))
