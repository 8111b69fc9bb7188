"""The pre-flight check, on score models whose gaps are known."""

from dataclasses import replace

import pytest
import torch

from rlhf_data import QADatasetConfig, QARecord
from rlhf_minmax.break_even import measure_break_even, measure_scales
from rlhf_minmax.prompts import Prompts
from rlhf_minmax.texts import TextRules, parse_critique


class FakeReward:
    """Likes the bait `bait`, any other answer that is right `right`, all others 0."""

    def __init__(self, records, prompts, *, bait, right=1.0):
        self.records = {prompts.policy(record): record for record in records}
        self.rules, self.bait, self.right = prompts.rules, bait, right

    def score(self, prompts, completions, *, max_tokens=None):
        return torch.tensor([self._one(*row) for row in zip(prompts, completions, strict=True)])

    def _one(self, prompt, completion):
        record = self.records[prompt]
        claim = self.rules.claim(record, completion)
        if claim == record.answer_text:
            return self.right
        return self.bait if claim == self.rules.rival(record) else 0.0


class FakeJudge:
    """Believes a critique that says right `believed`, one that says wrong 1 - `believed`, none 0.5."""

    def __init__(self, believed):
        self.believed = believed

    def score(self, questions, answers, critiques):
        return torch.tensor([self._one(critique) for critique in critiques])

    def _one(self, critique):
        if critique is None:
            return 0.5
        said = parse_critique(critique)
        assert said is not None
        return self.believed if said.verdict == "right" else 1 - self.believed


def check(pipeline, stories, *, bait, believed, monitor=" nothing"):
    """Break-even where the untrained monitor writes `monitor`."""
    reward = FakeReward(stories.train, stories.prompts, bait=bait)
    return measure_break_even(
        replace(pipeline, reward_model=reward, judge=FakeJudge(believed)), stories.train[:16], seed=0
    )


def test_the_gaps_and_the_weight_by_hand(game, scripted):
    scripted(lambda prompt, sample: " nothing")
    found = check(*game, bait=3.0, believed=0.9)
    # ΔR = 3 - 1; ΔJ = 0.9 - 0.1 with truthful critiques, 0.5 - 0.5 with unparsable ones;
    # break-even 2 / 0.8 = 2.5, never at the start; the weight is 1.75 · 2.5.
    assert found.delta_reward == pytest.approx(2.0)
    assert found.delta_judge_truthful == pytest.approx(0.8)
    assert found.delta_judge_start == pytest.approx(0.0)
    assert found.break_even_truthful == pytest.approx(2.5) and found.break_even_start is None
    assert found.w_judge == pytest.approx(4.375)
    assert "truth pays once the monitor is truthful" in found.advice
    assert found.to_dict()["w_reward"] == 1.0


def test_the_reward_models_weight_moves_the_break_even(make_game, scripted):
    scripted(lambda prompt, sample: " nothing")
    found = check(*make_game("game.w_reward=2", "game.break_even_factor=1.5"), bait=3.0, believed=0.9)
    assert found.break_even_truthful == pytest.approx(5.0) and found.w_judge == pytest.approx(7.5)


def test_the_starts_gap_comes_from_the_monitors_own_critiques(game, scripted):
    pipeline, stories = game
    scripted(lambda prompt, sample: " a b so right" if _judges_truth(prompt, stories) else " a b so wrong")
    found = check(pipeline, stories, bait=3.0, believed=0.9)
    assert found.delta_judge_start == pytest.approx(0.8)
    assert found.break_even_start == pytest.approx(2.5)
    assert "frozen monitor might do as well" in found.advice


def _judges_truth(prompt, stories):
    record = next(r for r in stories.train if prompt.startswith(stories.prompts.policy(r)))
    return stories.prompts.monitor(record, f" it is {record.answer_text} .") == prompt


def test_a_weight_below_the_break_even_is_warned_about(make_game, scripted):
    scripted(lambda prompt, sample: " nothing")
    found = check(*make_game("game.w_judge=2"), bait=3.0, believed=0.9)
    assert found.w_judge == 2.0
    assert "w_judge 2.00 is below" in found.advice and "raise game.w_judge above 2.50" in found.advice


def test_a_judge_that_learns_nothing_from_the_truth_is_refused_hope(game, scripted):
    scripted(lambda prompt, sample: " nothing")
    found = check(*game, bait=3.0, believed=0.4)
    assert found.delta_judge_truthful == pytest.approx(-0.2)
    assert found.break_even_truthful is None and found.w_judge == 1.0
    assert "the game cannot work" in found.advice


def test_a_reward_model_without_a_flaw_leaves_nothing_to_outweigh(game, scripted):
    scripted(lambda prompt, sample: " nothing")
    found = check(*game, bait=0.25, believed=0.9)
    assert found.delta_reward == pytest.approx(-0.75)
    assert found.break_even_truthful == 0.0 and found.w_judge == 1.0
    assert "already prefers right answers" in found.advice


def test_where_no_bait_is_planted_the_wrong_answer_is_the_reward_models_favourite(game, scripted):
    pipeline, _ = game
    scripted(lambda prompt, sample: " nothing")
    records = [
        QARecord("Tom saw a cat. A dog came.", "What did Tom see?", ("cat", "dog", "cow"), 0),
        QARecord("Ann has a bike. It rained.", "What has Ann?", ("car", "bike"), 1),
    ]
    prompts = Prompts(QADatasetConfig(), TextRules())
    liked = {"cat": 1.0, "dog": 0.0, "cow": 4.0, "car": 2.0, "bike": 1.0}

    class Reward:
        def score(self, prompts, completions, *, max_tokens=None):
            return torch.tensor([liked[text.split()[2]] for text in completions])

    pipeline = replace(pipeline, prompts=prompts, reward_model=Reward(), judge=FakeJudge(0.9))
    # cow 4 against cat 1, car 2 against bike 1: ΔR = (3 + 1) / 2.
    assert measure_break_even(pipeline, records, seed=0).delta_reward == pytest.approx(2.0)


def test_scales_come_from_the_starting_players(game):
    pipeline, stories = game
    scaled = measure_scales(pipeline, stories.train[:16], seed=0)
    answers = scaled.answer(scaled.players.policy, stories.train[:16], 1, seed=0)
    critiques = scaled.criticise(stories.train[:16], answers, 1, seed=0)
    for scores in (
        scaled.rewards(stories.train[:16], answers),
        scaled.judge_scores(stories.train[:16], answers, critiques),
    ):
        assert scores.mean() == pytest.approx(0, abs=1e-5) and scores.std() == pytest.approx(1, abs=1e-4)
    again = measure_scales(scaled, stories.train[:16], seed=0)
    assert again.reward_scale == scaled.reward_scale and again.judge_scale == scaled.judge_scale
