"""A judge that checks critiques: what refutes an answer, what is not checked, and what a check costs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from raises import raises_error
from rlhf_minmax import MinMaxConfig, MinMaxTrainer, load_stories
from rlhf_minmax.formats import TextRules
from rlhf_minmax.game.forward_pass import CritiqueSample
from rlhf_minmax.game.validator import Validator


def stories_of(world: str) -> Any:
    return load_stories(MinMaxConfig.from_dict({"data": {"world": world, "train_stories": 40}}))


def test_the_last_observation_refutes_a_place() -> None:
    stories = stories_of("stories")
    rules, judge = stories.prompts.rules, Validator(stories.prompts.rules)
    record = next(record for record in stories.train if rules.rival(record))
    right, rival = record.answer_text, rules.rival(record)
    truth, hearsay = rules.correct_evidence(record), rules.rival_evidence(record)
    asked = [
        (rival, f" {truth} so wrong"),  # refuted
        (rival, f" {truth} so right"),  # finds no fault
        (right, f" {truth} so wrong"),  # the evidence is true and speaks for the answer
        (right, f" {hearsay} so wrong"),  # hearsay is not true
        (rival, f" {truth.split('.')[0].rsplit(' ', 1)[0]} so wrong"),  # not a whole observation
        (rival, " nonsense"),
        (rival, None),
        (None, f" {truth} so wrong"),
    ]
    scores = judge.check([record] * 8, [claim for claim, _ in asked], [text for _, text in asked])
    assert scores.tolist() == [0, 1, 1, 1, 1, 1, 1, 1] and judge.calls == 4


def test_a_right_working_refutes_a_number() -> None:
    stories = stories_of("sums")
    rules, judge = stories.prompts.rules, Validator(stories.prompts.rules)
    record = next(record for record in stories.train if rules.rival(record))
    truth, false = rules.correct_evidence(record), rules.rival_evidence(record)
    rows = [(rules.rival(record), truth), (record.answer_text, truth), (record.answer_text, false)]
    scores = judge.check([record] * 3, [claim for claim, _ in rows], [f" {e} so wrong" for _, e in rows])
    assert scores.tolist() == [0, 1, 1] and judge.calls == 3


def test_both_players_are_paid_by_what_is_found(make_game: Any) -> None:
    pipeline, stories = make_game("judge_model.kind=validator", "training.batch_size=4")
    assert isinstance(pipeline.judge, Validator)
    output = pipeline.forward_pass(stories.train[:4], seed=0)
    rules = pipeline.prompts.rules

    def refuted(critique: CritiqueSample) -> bool:
        answer, parsed = output.judged[critique.answer], critique.parsed
        if parsed is None or parsed.verdict == "right" or answer.claim is None:
            return False
        return rules.refutes(output.records[answer.story], parsed.evidence, answer.claim)

    expected = torch.tensor([0.0 if refuted(critique) else 1.0 for critique in output.critiques])
    assert torch.equal(output.judge_scores, pipeline.judge_scale(expected))
    found_fault = sum(
        c.parsed is not None and c.parsed.verdict == "wrong" and output.judged[c.answer].claim is not None
        for c in output.critiques
    )
    assert pipeline.judge.calls == found_fault
    bare = pipeline.bare_judge_scores(output.records, output.judged)
    assert (
        torch.equal(bare, pipeline.judge_scale(torch.ones(len(bare)))) and pipeline.judge.calls == found_fault
    )


@pytest.mark.slow
def test_calls_are_counted_step_by_step(make_game: Any) -> None:
    pipeline, stories = make_game("judge_model.kind=validator", "training.batch_size=4")
    trainer = MinMaxTrainer(pipeline, pipeline.config, stories.train)
    before = pipeline.judge.calls
    counted = [trainer.train_step()["validator/calls"] or 0 for _ in range(2)]
    assert sum(counted) == pipeline.judge.calls - before > 0


def test_rows_need_rules_that_say_what_refutes(tmp_path: Path) -> None:
    row = {
        "story": "Tom went home. It rained.",
        "question": "Who?",
        "choices": ["Ann", "Tom"],
        "answer": "Tom",
    }
    rows = [{**row, "story": f"Tom went home on day {i}. It rained."} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    (tmp_path / "mine.py").write_text(
        "from rlhf_minmax import TextRules\n"
        "class Mine(TextRules):\n"
        "    def refutes(self, record, evidence, claim):\n"
        "        return self.evidence_holds(record, evidence) and claim not in evidence\n"
    )

    def load(**data: Any) -> Any:
        values = {"data": {"train_data": str(tmp_path / "rows.jsonl"), **data}}
        return load_stories(MinMaxConfig.from_dict({**values, "judge_model": {"kind": "validator"}}))

    with raises_error("no_validator", key="judge_model.kind"):
        load()
    rules = load(rules=f"{tmp_path}/mine.py:Mine").prompts.rules
    record = load(rules=f"{tmp_path}/mine.py:Mine").train[0]
    assert rules.refutes(record, record.story.split(". ")[0] + ".", "Ann")
    with raises_error("no_validator"):
        TextRules().refutes(record, "", "Ann")


def test_checks_that_no_critique_has_chosen() -> None:
    stories = stories_of("reports")
    rules = stories.prompts.rules
    record = next(record for record in stories.train if rules.rival(record))
    asked = [(record, rules.rival(record)), (record, record.answer_text), (record, None)]
    everything = Validator(rules, "all")
    # A story of four claims has four sentences, and the bait is false about one person.
    assert everything.check_without_critiques(asked, 2, seed=0).tolist() == [0, 1, 1]
    assert everything.calls == 8
    chance = Validator(rules, "random")
    scores = chance.check_without_critiques(asked, 4_000, seed=0)
    assert abs(float(scores[0]) - 3 / 4) < 0.03  # standard error of 4,000 draws: .007
    assert scores[1:].tolist() == [1, 1] and chance.calls == 8_000
    assert torch.equal(scores, Validator(rules, "random").check_without_critiques(asked, 4_000, seed=0))
    assert not torch.equal(scores, Validator(rules, "random").check_without_critiques(asked, 4_000, seed=1))


def test_the_policy_is_checked_without_its_monitor(make_game: Any) -> None:
    settings = ("judge_model.kind=validator", "judge_model.checks=all", "training.batch_size=4")
    pipeline, stories = make_game(*settings)
    batch, rules = stories.train[:4], pipeline.prompts.rules
    answers = [pipeline.made_up_answer(batch, i, i % 2 == 0, random.Random(0)) for i in range(4)]
    before = pipeline.judge.calls
    scores = pipeline.policy_judge_scores(batch, answers, seed=0)
    assert torch.equal(scores, pipeline.judge_scale(torch.tensor([1.0, 0.0, 1.0, 0.0])))
    assert pipeline.judge.calls - before == sum(len(rules.possible_evidence(record)) for record in batch)


def test_critiques_and_chance_count_alike(make_game: Any) -> None:
    settings = ("judge_model.kind=validator", "training.batch_size=4", "game.policy_critiques=3")
    pipeline, stories = make_game(*settings)
    batch, judge = stories.train[:4], pipeline.judge
    answers = [pipeline.made_up_answer(batch, i, False, random.Random(0)) for i in range(4)]
    scores = {}
    for judge.chooser in ("monitor", "random", "mixed"):
        scores[judge.chooser] = pipeline.policy_judge_scores(batch, answers, seed=5)
    assert torch.allclose(scores["mixed"], (scores["monitor"] + scores["random"]) / 2)
    assert not torch.equal(scores["monitor"], scores["random"])


@pytest.mark.parametrize("checks", ["mixed", "random"])
def test_random_checks_need_a_number_of_them(checks: str) -> None:
    settings = {"judge_model": {"kind": "validator", "checks": checks}, "game": {"policy_critiques": 0}}
    with raises_error("invalid_value", key=""):
        MinMaxConfig.from_dict(settings)
    with raises_error("invalid_value", key="judge_model"):
        MinMaxConfig.from_dict({"judge_model": {"kind": "rule", "checks": "all"}})
    with raises_error("invalid_value", key="held_out.judge"):
        MinMaxConfig.from_dict({"held_out": {"judge": {"kind": "validator", "checks": "all"}}})
