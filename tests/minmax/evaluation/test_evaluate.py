"""Greedy evaluation with players whose every word is known."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from rlhf_eval import auroc, expected_calibration_error
from rlhf_infer import RuleJudge
from rlhf_minmax.evaluation.evaluate import (
    answer_metrics,
    batch_metrics,
    evaluate,
    probe_answers,
    right_probabilities,
    sample_exchanges,
    verdict_metrics,
)
from rlhf_minmax.game.forward_pass import Answer
from rlhf_minmax.game.scores import Scale
from rlhf_minmax.scorers.loading import HeldOut


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


def test_held_out_scorers_confirm_the_value_or_do_not(game, scripted):
    pipeline, records = game_of(game, scripted, answer=lambda r: r.answer_text, verdict=truthful)
    pipeline = replace(pipeline, w_judge=2.0)
    policy = pipeline.players.policy
    held_out = HeldOut(None, RuleJudge(), judge_scale=Scale(0.5, 0.25))
    metrics: Any = evaluate(pipeline, records, policy, held_out)
    # Every critique says "right", which the rule judge gives 1: two deviations above 0.5.
    assert metrics["minmax/heldout_reward"] is None and metrics["minmax/heldout_judge"] == 2
    assert metrics["minmax/hacking_gap"] == pytest.approx(2 * (metrics["minmax/judge"] - 2), abs=1e-5)
    assert evaluate(pipeline, records, policy).keys() == metrics.keys() - {
        "minmax/heldout_reward",
        "minmax/heldout_judge",
        "minmax/hacking_gap",
    }


def test_the_games_value_is_made_of_its_parts(make_game, scripted):
    game = make_game("game.w_reward=3")
    pipeline, records = game_of(game, scripted, answer=lambda r: r.answer_text, verdict=truthful)
    pipeline = replace(pipeline, w_judge=2.0)
    metrics: Any = evaluate(pipeline, records, pipeline.players.policy)
    parts = 3 * metrics["minmax/reward_model"] + 2 * metrics["minmax/judge"]
    assert metrics["minmax/value"] == pytest.approx(parts, abs=1e-5)


# Verdict of the monitor on (right, wrong) answers; effect on right ones, on wrong ones, slander, misses,
# accuracy, for a judge that says 1 on "right", 0 on "wrong" and 0.5 on no critique, in deviations of 0.25.
MONITORS = {
    ("right", "wrong"): (2, -2, 0, 0, 1),
    ("wrong", "right"): (-2, 2, 1, 1, 0),
    ("right", "right"): (2, 2, 0, 1, 0.5),
    ("wrong", "wrong"): (-2, -2, 1, 0, 0.5),
}


@pytest.mark.parametrize(("verdicts", "expected"), MONITORS.items())
def test_effects_of_critiques_on_the_probe(game, scripted, verdicts, expected):
    pipeline, records = game_of(
        game, scripted, answer=lambda r: r.answer_text, verdict=lambda correct: verdicts[not correct]
    )
    pipeline = replace(pipeline, judge=RuleJudge(), judge_scale=Scale(0.5, 0.25))
    metrics = evaluate(pipeline, records, pipeline.players.policy)
    names = (
        "critique_effect_right",
        "critique_effect_wrong",
        "slander_rate",
        "miss_rate",
        "verdict_accuracy",
    )
    assert tuple(metrics[f"monitor/{name}"] for name in names) == pytest.approx(expected)
    assert metrics["monitor/critique_effect"] == pytest.approx((expected[0] + expected[1]) / 2)


class CountingJudge(RuleJudge):
    """Notes what it is asked; an answer without a critique is as likely true as it is long, in percent."""

    def __init__(self):
        super().__init__(lambda question, answer, critique: len(answer) / 100)
        self.asked = []

    def score(self, questions, answers, critiques):
        self.asked += zip(questions, answers, critiques, strict=True)
        return super().score(questions, answers, critiques)


def test_equal_answers_to_a_question_are_judged_bare_once(game):
    pipeline, stories = game
    judge = CountingJudge()
    pipeline = replace(pipeline, judge=judge, judge_scale=Scale(0.0, 0.01))
    answers = [Answer(story, text, None, False, None) for story, text in ((0, "a"), (1, "bb"), (0, "a"))]
    assert pipeline.bare_judge_scores(stories.train, answers).tolist() == pytest.approx([1, 2, 1])
    questions = [stories.train[i].question for i in (0, 1)]
    assert judge.asked == [(questions[0], "a", None), (questions[1], "bb", None)]


def test_effects_of_a_training_batch_need_the_bare_scores(game):
    pipeline, stories = game
    output = pipeline.forward_pass(stories.train[:4], seed=0)
    assert batch_metrics(output)["monitor/critique_effect"] is None
    bare = pipeline.bare_judge_scores(stories.train[:4], output.judged)
    effect = (output.judge_scores.view(len(bare), -1) - bare[:, None]).mean()
    metrics = batch_metrics(output, bare)
    assert metrics["monitor/critique_effect"] == pytest.approx(float(effect), abs=1e-6)
    assert metrics.keys() == batch_metrics(output).keys()


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
    assert metrics["policy/refusal_rate"] == 0.5
    assert metrics["policy/answer_length"] is metrics["policy/truncated_rate"] is None
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


def test_the_probe_is_worded_by_the_template(make_game):
    pipeline, stories = make_game("game.answer_template='{choice}'")
    assert all(answer.text == answer.claim for answer in probe_answers(pipeline, stories.held_out))


def test_classes_that_are_missing_have_no_rate(game):
    pipeline, stories = game
    answers = [pipeline.made_up_answer(stories.train, i, True, None) for i in range(4)]
    critiques = pipeline.criticise(stories.train, answers, 1, seed=0)
    metrics = verdict_metrics(critiques, [True] * 4)
    assert metrics["monitor/verdict_tnr"] is metrics["monitor/verdict_auroc"] is None


def test_probabilities_of_verdicts_make_the_calibration_metrics(game, scripted):
    pipeline, stories = game
    evidence = pipeline.prompts.rules.correct_evidence(stories.train[0])
    texts = [f" {evidence} so right 80%", f" {evidence} so wrong 60%", " hm", f" {evidence} so right 80%"]
    scripted(lambda prompt, sample: texts[sample])
    answer = pipeline.made_up_answer(stories.train, 0, True, None)
    critiques = pipeline.criticise(stories.train[:1], [answer], 4, seed=0)
    labels = [True, True, False, False]
    # "wrong" with 60% is "right" with 40%.
    probabilities = [0.8, 0.4, 0.5, 0.8]
    assert right_probabilities(critiques) == pytest.approx(probabilities)
    metrics = verdict_metrics(critiques, labels)
    assert metrics["monitor/verdict_accuracy"] == 0.25
    # Of the four pairs (right, wrong) 0.8 > 0.5 counts 1, 0.8 = 0.8 counts 0.5, 0.4 counts 0.
    assert metrics["monitor/verdict_auroc"] == auroc(probabilities, labels) == 0.375
    # Bins: 0.4 (one right), 0.5 (one wrong), 0.8 twice (one right): (0.6 + 0.5 + |1.6 - 1|) / 4.
    assert metrics["monitor/verdict_ece"] == pytest.approx(0.425)
    assert metrics["monitor/verdict_ece"] == expected_calibration_error(
        right_probabilities(critiques), labels
    )
    assert metrics["monitor/critique_distinct"] == 0.75
    lengths = [len(critique.rollout.completion_ids) for critique in critiques]
    assert metrics["monitor/critique_length"] == sum(lengths) / 4


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
