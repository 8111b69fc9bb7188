"""Past policies against past monitors, with players whose every word is known."""

from dataclasses import replace

import pytest
import torch

from rlhf_infer import RuleJudge
from rlhf_minmax.evaluation.cross_play import CrossPlay, cross_play
from rlhf_minmax.game.scores import Scale
from rlhf_minmax.players.past_players import Member


def marked(player, step):
    """A snapshot all of whose parameters are its step."""
    return Member(step, tuple(torch.full_like(parameter, float(step)) for parameter in player.parameters()))


def playing_as(player):
    """Which marked snapshot a player is now."""
    return int(player.parameters()[0].flatten()[0])


def test_the_matrix_by_hand(make_game, scripted):
    pipeline, stories = make_game("game.w_reward=0")
    rules, players, records = pipeline.prompts.rules, pipeline.players, stories.held_out
    record_of = {pipeline.prompts.policy(record): record for record in records}

    def reply(prompt, sample):
        if prompt in record_of:
            record = record_of[prompt]
            wrong = next(choice for choice in record.choices if choice != record.answer_text)
            return f" it is {record.answer_text if playing_as(players.policy) == 8 else wrong} ."
        record = next(r for start, r in record_of.items() if prompt.startswith(start))
        correct = prompt == pipeline.prompts.monitor(record, f" it is {record.answer_text} .")
        verdict = "right" if correct or playing_as(players.monitor) == 2 else "wrong"
        return f" {rules.correct_evidence(record)} so {verdict}"

    scripted(reply)
    pipeline = replace(pipeline, judge=RuleJudge(), judge_scale=Scale(0.5, 0.5), w_judge=3.0)
    before = [p.detach().clone() for p in (*players.policy.parameters(), *players.monitor.parameters())]
    # Policy 1 is always wrong, policy 8 always right; monitor 2 always says right, monitors 4 and 9 are
    # truthful; the judge believes: +1 for "right", -1 for "wrong", times w_judge.
    found = cross_play(
        pipeline,
        [marked(players.policy, step) for step in (1, 8)],
        [marked(players.monitor, step) for step in (2, 4, 9)],
        records,
    )
    assert found == CrossPlay(
        [1, 8],
        [2, 4, 9],
        [[3.0, -3.0, -3.0], [3.0, 3.0, 3.0]],
        [[0.0, 1.0, 1.0], [1.0, 1.0, 1.0]],
        [0.0, 1.0],
    )
    after = [*players.policy.parameters(), *players.monitor.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_keys_name_the_steps():
    found = CrossPlay([1, 8], [2], [[0.5], [0.25]], [[1.0], [0.75]], [0.0, 1.0])
    assert found.to_metrics() == pytest.approx(
        {
            "minmax/crossplay/1_2": 0.5,
            "minmax/crossplay/8_2": 0.25,
            "monitor/crossplay_accuracy/1_2": 1.0,
            "monitor/crossplay_accuracy/8_2": 0.75,
            "policy/crossplay_accuracy/1": 0.0,
            "policy/crossplay_accuracy/8": 1.0,
        }
    )
