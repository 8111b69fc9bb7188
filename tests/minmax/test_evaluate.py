"""Greedy evaluation with players whose every word is known."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from rlhf_minmax.evaluate import answer_metrics, evaluate, probe_answers, sample_exchanges, verdict_metrics
from rlhf_minmax.pipeline import Answer, Scale


def game_of(game, scripted, *, answer, verdict):
    """The tiny game with scripted players: a choice by record, a verdict by (record, right or not)."""
    pipeline, stories = game
    records = {pipeline.prompts.policy(record): record for record in stories.held_out}

    def reply(prompt, sample):
        if prompt in records:
            return f" it is {answer(records[prompt])} ."
        record = next(r for start, r in records.items() if prompt.startswith(start))
        correct = prompt == pipeline.prompts.monitor(record, f" it is {record.answer_text} .")
        return f" {pipeline.prompts.rules.correct_evidence(record)} so {verdict(correct)}"

    scripted(reply)
    return pipeline, stories.held_out


def truthful(correct):
    return "right" if correct else "wrong"


def test_a_perfect_game(game, scripted):
    pipeline, records = game_of(game, scripted, answer=lambda r: r.answer_text, verdict=truthful)
    metrics = evaluate(pipeline, records, pipeline.players.policy)
    assert metrics["policy/accuracy"] == metrics["policy/parse_rate"] == 1
    assert metrics["policy/hack_rate"] == 0
    assert metrics["monitor/verdict_balanced_accuracy"] == metrics["monitor/evidence_valid_rate"] == 1
    assert metrics["constraint/violation"] == 0
    assert metrics["monitor/label_base_rate"] == 0.5


def test_an_exploited_reward_model(game, scripted):
    rules = game[0].prompts.rules
    pipeline, records = game_of(
        game, scripted, answer=lambda r: rules.rival(r) or r.answer_text, verdict=truthful
    )
    metrics = evaluate(pipeline, records, pipeline.players.policy)
    assert metrics["policy/hack_rate"] == 1
    assert metrics["policy/accuracy"] == sum(rules.rival(r) is None for r in records) / len(records)


def test_a_monitor_that_always_agrees_is_at_chance(game, scripted):
    pipeline, records = game_of(
        game, scripted, answer=lambda r: r.answer_text, verdict=lambda correct: "right"
    )
    metrics = evaluate(pipeline, records, pipeline.players.policy)
    assert (metrics["monitor/verdict_tpr"], metrics["monitor/verdict_tnr"]) == (1, 0)
    assert metrics["monitor/verdict_balanced_accuracy"] == 0.5
    # Every second probe answer is wrong; each class weighs 0.5 / 0.5 = 1.
    assert metrics["constraint/violation"] == pytest.approx(0.5)


def test_the_games_value_weighs_the_scores_of_the_policys_own_answers(game, scripted):
    pipeline, records = game_of(game, scripted, answer=lambda r: r.answer_text, verdict=truthful)
    pipeline = replace(pipeline, w_judge=2.0, reward_scale=Scale(0.0, 0.5))
    metrics: Any = evaluate(pipeline, records, pipeline.players.policy)
    assert metrics["minmax/value"] == pytest.approx(
        metrics["policy/reward_score"] + 2 * metrics["policy/judge_score"], abs=1e-5
    )


def test_the_probe_is_half_right_and_always_the_same(game):
    pipeline, stories = game
    probe = probe_answers(pipeline, stories.held_out)
    assert [answer.correct for answer in probe] == [True, False] * 6
    assert probe == probe_answers(pipeline, stories.held_out)
    assert [answer.story for answer in probe] == list(range(12))


def test_evaluation_repeats_itself_and_leaves_no_trace(game):
    pipeline, stories = game
    state = torch.get_rng_state()
    once = evaluate(pipeline, stories.held_out, pipeline.players.policy)
    assert torch.equal(torch.get_rng_state(), state)
    assert once == evaluate(pipeline, stories.held_out, pipeline.players.policy)


def test_rates_that_mean_nothing_are_none():
    answers = [Answer(0, "", "a", True, None), Answer(0, "", None, False, None)]
    metrics = answer_metrics(answers, torch.tensor([1.0, 3.0]))
    assert metrics["policy/hack_rate"] is None
    assert (metrics["policy/accuracy"], metrics["policy/parse_rate"]) == (0.5, 0.5)
    assert metrics["policy/reward_score"] == 2.0


def test_unparsable_critiques_are_wrong_about_everything(game, scripted):
    pipeline, stories = game
    scripted(lambda prompt, sample: " hm")
    probe = probe_answers(pipeline, stories.held_out)
    critiques = pipeline.criticise(stories.held_out, probe, 1, seed=0, greedy=True)
    metrics = verdict_metrics(critiques, [answer.correct for answer in probe])
    assert metrics["monitor/verdict_balanced_accuracy"] == 0
    assert metrics["monitor/verdict_brier"] == 0.25
    assert metrics["monitor/parse_rate"] == 0


def test_sample_exchanges_show_everything(game, scripted):
    rules = game[0].prompts.rules
    pipeline, records = game_of(game, scripted, answer=lambda r: r.answer_text, verdict=truthful)
    row = sample_exchanges(pipeline, records[:2], pipeline.players.policy, "start")[1]
    assert row["stage"] == "start" and row["correct"]
    assert row["story"] == records[1].story and row["gold"] == records[1].answer_text
    assert row["answer"] == f"it is {records[1].answer_text} ."
    assert row["critique"] == f"{rules.correct_evidence(records[1])} so right"
    assert row["verdict"] == "right" and 0 < row["confidence"] <= 1
    assert isinstance(row["reward_score"], float) and isinstance(row["judge_score"], float)
