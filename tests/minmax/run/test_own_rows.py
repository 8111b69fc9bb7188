"""Rows of one's own: what is refused, skipped, said beforehand, and learned from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raises import raises_error
from rlhf_data import QARecord, RunFolder, UserError, apply_overrides
from rlhf_minmax import Events, MinMaxConfig, MinMaxJob
from rlhf_minmax.demo.builder import DemoModels, demo_folder, demo_models, missed_gates
from rlhf_minmax.evaluation.break_even import ReadRates, measure_break_even, measure_scales, why_impossible
from rlhf_minmax.formats import TextRules, parse_critique
from rlhf_minmax.game.stories import load_stories
from rlhf_minmax.run.checks import Checked, check_run, time_to_build
from rlhf_minmax.run.dry_run import plan_run
from rlhf_minmax.run.row_checks import row_warnings
from rlhf_models import DeviceManager

NAMES = ("Tom", "Ann", "Mia", "Ben", "Eva", "Sam")
PLACES = ("the old barn", "the big lake", "the corner shop", "the town hall")
SMALL = (
    *("demo.pretrain_steps=1", "demo.sft_steps=1", "demo.reward_steps=1", "demo.judge_steps=1"),
    *("demo.batch_size=4", "data.probe_stories=4"),
)
Rows = Callable[..., Path]


def row(i: int, *, told: bool = True) -> dict[str, Any]:
    """A story of several sentences; `told` when the right choice stands in it word for word."""
    name, friend = NAMES[i % 6], NAMES[(i + 1) % 6]
    place, other = PLACES[i % 4], PLACES[(i + 1) % 4]
    right = f"She went to {place} with {friend}." if told else f"Because {friend} had asked her for help."
    story = (
        f"{name} woke up early on day {i} and ate some bread. It was raining, so she took her red coat. "
        f"She went to {place} with {friend}. They did not go to {other}, which was closed. "
        f"In the evening both of them were tired and happy."
    )
    choices = [right, f"She went to {other} alone.", "She stayed at home all day long.", "Nobody knows that."]
    return {"story": story, "question": f"What did {name} do?", "choices": choices, "answer": right}


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rows:
    """Writes rows, of which the first `told` name their right choice; the file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def write(count: int = 40, told: int | None = None, more: tuple[dict[str, Any], ...] = ()) -> Path:
        path = tmp_path / "rows.jsonl"
        told = count if told is None else told
        lines = [*(row(i, told=i < told) for i in range(count)), *more]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    return write


def config_of(path: Path, *overrides: str) -> MinMaxConfig:
    return MinMaxConfig.from_dict(apply_overrides({}, [f"data.train_data={path}", *SMALL, *overrides]))


def checked(config: MinMaxConfig) -> Checked:
    return check_run(config, load_stories(config), DeviceManager())


def test_the_share_of_stories_that_name_their_right_choice_is_said(rows: Rows) -> None:
    assert not any("name their right choice" in text for text in checked(config_of(rows())).warnings)
    told = [text for text in checked(config_of(rows(told=30))).warnings if "name their right choice" in text]
    assert len(told) == 1 and "built from those" in told[0]


def test_marked_evidence_stands_in_for_a_choice_that_the_story_does_not_spell_out(rows: Rows) -> None:
    path = rows(told=0)
    marked = [json.loads(line) for line in path.read_text().splitlines()]
    for i, line in enumerate(marked):
        line["quote"] = f"She went to {PLACES[i % 4]} with {NAMES[(i + 1) % 6]}."
    path.write_text("".join(json.dumps(line) + "\n" for line in marked))
    with raises_error("too_little_evidence"):
        checked(config_of(path))
    config = config_of(path, "data.columns.evidence_column=quote")
    assert not any("name their right choice" in text for text in checked(config).warnings)
    stories = load_stories(config)
    other = [replace(record, evidence="It was raining") for record in stories.building]
    folders = {
        demo_folder(records, stories.prompts, config.demo_settings(), seed=0)
        for records in (stories.building, other)
    }
    assert len(folders) == 2  # models that learned other quotations are others


def test_rows_that_contradict_each_other_are_warned_of_once(rows: Rows) -> None:
    def warned(*more: dict[str, Any]) -> list[str]:
        config = config_of(rows(more=more), "data.label_share=0.5")
        found = row_warnings(config, load_stories(config))
        return [text for text in found if "different right answers" in text]

    others = [row(i) | {"answer": i % 2 + 1} for i in range(5)]
    (text,) = warned(*others, row(7), others[0])
    path = rows()
    assert text.startswith("5 stories") and f"{path}, line 1," in text and f"{path}, line 41;" in text
    assert repr(row(0)["answer"]) in text and repr(row(0)["choices"][1]) in text
    same, reordered = row(0), row(1) | {"choices": row(1)["choices"][::-1]}
    asked_otherwise = row(2) | {"choices": ["She slept.", "She ran."], "answer": 0}
    unlabelled, another = row(3) | {"answer": None}, others[4] | {"question": "What else?"}
    assert not warned(same, reordered, asked_otherwise, unlabelled, another)


def test_a_share_of_labels_that_hides_none_is_warned_of(rows: Rows) -> None:
    told = [row(i) for i in range(60)]
    path = rows(more=tuple({**each, "story": f"Later. {each['story']}", "answer": None} for each in told))

    def warned(share: float) -> bool:
        warnings = checked(config_of(path, f"data.label_share={share}")).warnings
        return any("hides no answer" in text for text in warnings)

    assert not warned(0.05) and warned(0.9)


def test_too_few_such_stories_are_refused(rows: Rows) -> None:
    path = rows(told=10)
    with raises_error("too_little_evidence"):
        checked(config_of(path))
    checked(config_of(path, "demo.min_evidence_share=0.1"))
    checked(config_of(path, "force=true"))
    with raises_error("too_little_evidence"):
        checked(config_of(rows(told=0), "demo.min_evidence_share=0", "force=true"))


def test_tiny_models_from_a_file_are_warned_of(rows: Rows) -> None:
    assert any("too small to read prose" in text for text in checked(config_of(rows())).warnings)


def test_end_sentence_choices_that_would_be_cut_off_are_warned_of(rows: Rows) -> None:
    found = " ".join(checked(config_of(rows(), "policy_model.max_new_tokens=4")).warnings)
    assert "right answers would be cut off by policy_model.max_new_tokens 4" in found


LONG = row(77) | {"story": " ".join(["It was a very long day."] * 900)}


def test_a_row_that_is_too_long_is_named_by_its_line(rows: Rows) -> None:
    path = rows(12, more=(LONG,))
    with pytest.raises(UserError, match=r"rows\.jsonl, line 13: .*context holds 2048.*--on-bad-row skip"):
        checked(config_of(path, "demo.min_evidence_share=0.1"))


def test_rows_that_are_too_long_or_wrong_are_skipped_and_counted(rows: Rows) -> None:
    wrong = row(50) | {"question": None}
    path = rows(12, more=(LONG, wrong))
    with raises_error("missing_column", where=f"{path}, line 14", column="question"):
        load_stories(config_of(path))
    found = checked(config_of(path, "data.on_bad_row=skip"))
    assert len(found.stories.train) + len(found.stories.held_out) == 12
    assert {text.split(":")[0].rpartition("line ")[2] for text in found.stories.skipped} == {
        "13",
        "14, field question",
    }
    assert any("rows left out: 2" in text for text in found.warnings)
    assert all(record.where for record in found.stories.train)


def test_a_file_of_bad_rows_only_is_refused(rows: Rows) -> None:
    path = rows(0, more=(row(1) | {"answer": "nobody"}, row(2) | {"story": ""}))
    with raises_error("no_row_left"):
        load_stories(config_of(path, "data.on_bad_row=skip"))


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (4, 1), (9, 2), (31, 7), (32, 8), (64, 8), (500, 8)])
def test_the_warm_up_is_a_quarter_of_a_short_run(steps: int, warmup: int) -> None:
    training = MinMaxConfig().training
    assert training.num_warmup_steps(steps) == warmup
    fixed = MinMaxConfig.from_dict({"training": {"monitor_warmup_steps": 3, "max_steps": steps}}).training
    assert fixed.num_warmup_steps(steps) == 3
    alone = training.model_copy(update={"max_steps": steps})
    assert alone.num_steps(100, adversary=False) == steps - warmup


def test_a_policy_that_learns_in_few_steps_is_warned_of(rows: Rows) -> None:
    path = rows(40)
    few = [text for text in checked(config_of(path)).warnings if "learns in" in text]
    assert len(few) == 1 and "--max-steps" in few[0]
    enough = checked(config_of(path, "training.max_steps=14")).warnings
    assert not any("learns in" in text for text in enough)  # 3 of warm-up, 11 of the policy


@pytest.mark.slow
def test_the_time_to_build_is_said_beforehand(rows: Rows, tmp_path: Path) -> None:
    config = config_of(rows(), "force=true", "demo.pretrain_steps=200")
    one = time_to_build(config_of(rows(), "force=true"), checked(config))
    many = time_to_build(config, checked(config))
    assert one is not None and many is not None and many > 5 * one > 0
    assert dict(plan_run(config)["rows"])["built models"].startswith("to be built first, in about ")
    quick = config_of(rows(), "force=true")
    found = checked(quick)
    demo_models(found.stories.building, found.stories.prompts, quick.demo_settings(), seed=0, force=True)
    assert time_to_build(quick, found) is None
    assert dict(plan_run(quick)["rows"])["built models"].startswith("cached in ")
    named = config_of(rows(), "policy_model.model_name=x", "monitor_model.model_name=x")
    named = named.model_copy(
        update={
            "reward_model": named.reward_model.model_copy(update={"model_name": "x"}),
            "judge_model": named.judge_model.model_copy(update={"model_name": "x"}),
        }
    )
    assert time_to_build(named, found) is None


def build(config: MinMaxConfig, cache: Path, **more: Any) -> DemoModels:
    stories = load_stories(config)
    built = stories.building, stories.prompts, config.demo_settings()
    return demo_models(*built, seed=config.seed, cache_folder=cache, **more)


def test_a_base_that_cannot_read_is_refused_unless_forced(rows: Rows, tmp_path: Path) -> None:
    config = config_of(rows(12), "demo.min_judge_accuracy=0")
    stages: list[str] = []
    with pytest.raises(UserError, match=r"demo\.min_verdict_accuracy 0\.98.*--force"):
        build(config, tmp_path, progress=lambda stage, *_: stages.append(stage))
    name = "base: correct answers and critiques"
    assert all(stage.startswith(name) for stage in stages)  # nothing is made from such a base
    assert len(set(stages)) > 1, "further passes and fresh starts have names of their own"
    demo = build(config, tmp_path, force=True)
    (missed,) = missed_gates(demo, config.demo)
    assert "true verdict" in missed
    with raises_error("demo_too_weak"):  # what was forced into the cache is no better
        build(config, tmp_path)


def test_a_judge_that_cannot_read_is_refused_and_kept(rows: Rows, tmp_path: Path) -> None:
    config = config_of(rows(40), "demo.min_verdict_accuracy=0", "demo.min_judge_accuracy=1")
    with pytest.raises(UserError, match=r"demo\.min_judge_accuracy 1"):
        build(config, tmp_path)
    lower = config_of(rows(40), "demo.min_verdict_accuracy=0", "demo.min_judge_accuracy=0")
    stages: list[str] = []
    demo = build(lower, tmp_path, progress=lambda stage, *_: stages.append(stage))
    assert stages == [] and missed_gates(demo, lower.demo) == []


@pytest.mark.slow
def test_a_forced_run_is_warned_and_another_ends_before_the_game(rows: Rows, tmp_path: Path) -> None:
    class Log(Events):
        told: list[str]
        phases: list[str]

        def __init__(self) -> None:
            self.told, self.phases = [], []

        def warning(self, text: str) -> None:
            self.told.append(text)

        def phase(self, name: str, start: int, total: int) -> None:
            self.phases.append(name)

    gates = ("demo.min_verdict_accuracy=0", "demo.min_judge_accuracy=0", "training.max_steps=1")
    small = ("training.batch_size=2", "game.num_generations=2", "game.num_critiques=2", "baseline=false")
    log = Log()
    job = MinMaxJob(config_of(rows(12), *gates, *small), RunFolder.create(tmp_path / "run"), log)
    with raises_error("game_cannot_work"):
        job.play()
    assert log.phases == [] and not (tmp_path / "run" / "results.json").exists()
    forced = Log()
    config = config_of(rows(12), *gates, *small, "force=true")
    MinMaxJob(config, RunFolder.create(tmp_path / "forced"), forced).play()
    assert forced.phases == ["minmax"] and any("can be read" in text for text in forced.told)
    # Evaluating the start is no game.
    MinMaxJob(
        config_of(rows(12), *gates, *small), RunFolder.create(tmp_path / "start"), Log()
    ).evaluate_only()


class Judge:
    """Believes a critique that says right 0.9, one that says wrong 0.1, and none 0.5."""

    def score(self, questions: Any, answers: Any, critiques: Any) -> Any:
        import torch

        said = [None if critique is None else parse_critique(critique) for critique in critiques]
        values = {None: 0.5, "right": 0.9, "wrong": 0.1}
        return torch.tensor([values[each.verdict if each else None] for each in said])


@pytest.mark.slow
def test_without_a_critique_that_can_be_read_the_judges_scale_is_that_of_truthful_ones(
    game: Any, scripted: Callable[..., None]
) -> None:
    scripted(lambda prompt, sample: " nothing")
    pipeline, stories = game
    scaled, read = measure_scales(replace(pipeline, judge=Judge()), stories.train[:8], seed=0)
    assert read.critiques == 0
    # Half of the answers are right: mean 0.5, deviation 0.4 · √(16 / 15).
    assert scaled.judge_scale.mean == pytest.approx(0.5)
    assert scaled.judge_scale.std == pytest.approx(0.4 * (16 / 15) ** 0.5)


def test_what_makes_a_game_impossible(game: Any, scripted: Callable[..., None]) -> None:
    scripted(lambda prompt, sample: " nothing")
    pipeline, stories = game
    check = measure_break_even(replace(pipeline, judge=Judge()), stories.train[:8], seed=0)
    assert check.judge_reads is True
    assert why_impossible(check, ReadRates(0.2, 0.02)) == []
    answers, critiques = why_impossible(check, ReadRates(0.005, 0.0))
    assert "0.5%" in answers and "answers" in answers and "critiques" in critiques
    assert len(why_impossible(replace(check, judge_reads=False), ReadRates(1, 1))) == 1
    assert why_impossible(replace(check, judge_reads=None), ReadRates(1, 1)) == []


TOLD = QARecord("Tom saw a cat. A dog came.", "What did Tom see?", ("cat", "dog"), 0)
UNTOLD = QARecord("Tom slept. It rained.", "What did Tom see?", ("nothing at all", "dog"), 0)


def test_the_break_even_check_leaves_out_stories_without_evidence(
    game: Any, scripted: Callable[..., None]
) -> None:
    scripted(lambda prompt, sample: " nothing")
    pipeline = replace(game[0], judge=Judge(), prompts=replace(game[0].prompts, rules=TextRules()))
    both = measure_break_even(pipeline, [TOLD, UNTOLD, TOLD], seed=0)
    assert (both.stories, both.left_out, both.judge_reads) == (2, 1, True)
    assert both.delta_judge_truthful == pytest.approx(0.8)
    none = measure_break_even(pipeline, [UNTOLD, UNTOLD], seed=0)
    assert (none.stories, none.left_out, none.judge_reads) == (2, 2, None)
    assert (
        none.delta_judge_truthful is None and none.pays_truthful is None and none.break_even_truthful is None
    )
    assert "set game.w_judge" in none.advice and none.w_judge == 1.0


@pytest.mark.parametrize(
    ("overrides", "flawed"),
    [
        ((), True),
        (("judge_model.kind=rule",), True),
        (("policy_model.model_name=x",), False),
        (("monitor_model.model_name=x",), False),
        (("policy_model.model_name=x", "demo.flawed_reward=true"), True),
        (("demo.flawed_reward=false",), False),
        (("data.train_data=own.jsonl",), False),
        (("data.train_data=own.jsonl", "demo.flawed_reward=true"), True),
    ],
)
def test_a_flaw_is_planted_unless_a_player_is_named(overrides: tuple[str, ...], flawed: bool) -> None:
    config = MinMaxConfig.from_dict(apply_overrides({}, list(overrides)))
    assert config.demo_settings().flawed_reward is flawed


@pytest.mark.slow
def test_a_pass_without_a_seed_differs_from_the_one_before(make_game: Callable[..., Any]) -> None:
    def texts(pipeline: Any, **seed: int) -> list[str]:
        return [answer.text for answer in pipeline.forward_pass(stories.train[:4], **seed).answers]

    pipeline, stories = make_game()
    first, second = texts(pipeline), texts(pipeline)
    again, _ = make_game()
    assert first != second and [texts(again), texts(again)] == [first, second]
    assert texts(again, seed=0) == first


@pytest.mark.parametrize(
    ("data", "demo", "steps", "verdicts", "judge"),
    [
        ({}, {}, 300, 0.98, 0.9),
        ({"world": "sums"}, {}, 300, 0.98, 0.8),
        ({"world": "sums"}, {"min_judge_accuracy": 0.95}, 300, 0.98, 0.95),
        ({"world": "reports"}, {}, 600, 0.9, 0.9),
        ({"world": "reports"}, {"pretrain_steps": 7, "min_verdict_accuracy": 0}, 7, 0, 0.9),
        ({"world": "reports", "train_data": "own.jsonl"}, {}, 300, 0.98, 0.9),  # the world is not played
        ({"world": "sums", "train_data": "own.jsonl"}, {}, 300, 0.98, 0.9),
    ],
)
def test_worlds_have_steps_and_gates_of_their_own(
    data: Any, demo: Any, steps: int, verdicts: float, judge: float
) -> None:
    settings = MinMaxConfig.from_dict({"data": data, "demo": demo}).demo_settings()
    assert (settings.num_pretrain_steps, settings.least_verdict_accuracy) == (steps, verdicts)
    assert settings.least_judge_accuracy == judge
