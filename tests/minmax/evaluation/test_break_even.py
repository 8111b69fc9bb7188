"""The pre-flight check, on score models whose gaps are known."""

from dataclasses import replace

import pytest
import torch

from proofs import by_default
from rlhf_data import QADatasetConfig, QARecord
from rlhf_minmax.config.run import GameConfig
from rlhf_minmax.evaluation.break_even import (
    ReadRates,
    _is_chance,
    default_weight,
    measure_break_even,
    measure_scales,
    why_impossible,
)
from rlhf_minmax.formats import TextRules, parse_critique
from rlhf_minmax.game.prompts import Prompts


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
        assert len(questions) == len(answers) == len(critiques)
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
    # break-even 2 / 0.8 = 2.5, never at the start; the weight is 2 · 2.5.
    assert found.delta_reward == pytest.approx(2.0)
    assert found.delta_judge_truthful == pytest.approx(0.8)
    assert found.delta_judge_start == pytest.approx(0.0)
    assert found.break_even_truthful == pytest.approx(2.5) and found.break_even_start is None
    assert found.w_judge == pytest.approx(5.0)
    # On every story 5 · 0.8 > 2, and 5 · 0 < 2.
    assert (found.pays_start, found.pays_truthful) == (0.0, 1.0)
    assert "on 0% of the stories" in found.advice and "only a better monitor makes it pay" in found.advice
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
    assert found.pays_start == 1.0 and "frozen monitor might do as well" in found.advice


def test_answers_are_worded_as_the_policys(make_game, scripted):
    pipeline, stories = make_game("game.answer_template='{choice}'")
    read = []

    class Reward(FakeReward):
        def score(self, prompts, completions, *, max_tokens=None):
            read.extend(completions)
            return super().score(prompts, completions)

    scripted(lambda prompt, sample: " nothing")
    reward = Reward(stories.train, stories.prompts, bait=3.0)
    measure_break_even(replace(pipeline, reward_model=reward, judge=FakeJudge(0.9)), stories.train, seed=0)
    assert set(read) <= {choice for record in stories.train for choice in record.choices}


def _judges_truth(prompt, stories):
    record = next(r for r in stories.train if prompt.startswith(stories.prompts.policy(r)))
    return stories.prompts.monitor(record, f" it is {record.answer_text} .") == prompt


class UnevenReward(FakeReward):
    """Likes the bait of the story `spoilt` by 2 more."""

    spoilt = None

    def _one(self, prompt, completion):
        score, record = super()._one(prompt, completion), self.records[prompt]
        return score + 2 * (record == self.spoilt and score == self.bait)


@pytest.mark.parametrize(
    ("w_judge", "start", "truthful", "said"),
    [
        (2, 0.3, 0.9, "raise game.w_judge"),
        pytest.param(4, 0.4, 1.0, "only a better monitor makes it pay", marks=pytest.mark.slow),
    ],
)
def test_truth_pays_on_a_share_of_the_stories(make_game, scripted, w_judge, start, truthful, said):
    pipeline, stories = make_game(f"game.w_judge={w_judge}")
    records = [r for r in stories.train if stories.prompts.rules.rival(r)][:10]
    known = [stories.prompts.policy(record) for record in records[:4]]

    def critique(prompt, sample):
        exposed = not _judges_truth(prompt, stories) and any(prompt.startswith(text) for text in known)
        return " a b so wrong" if exposed else " a b so right"

    scripted(critique)
    reward = UnevenReward(stories.train, stories.prompts, bait=2.0)
    reward.spoilt = records[0]
    found = measure_break_even(replace(pipeline, reward_model=reward, judge=FakeJudge(0.9)), records, seed=0)
    # ΔR is 3 on the first story, 1 on nine; ΔJ is 0.8 with the truth, and for this monitor on four stories,
    # the first among them, 0 on six. At weight 2 gain 1.6 outweighs 1 only, at 4 gain 3.2 outweighs 3 too.
    assert found.pays_start == pytest.approx(start) and found.pays_truthful == pytest.approx(truthful)
    # Means: 1.2 / 0.32 and 1.2 / 0.8. Weight 4 is above both, and yet truth does not pay on six stories.
    assert found.break_even_start == pytest.approx(3.75)
    assert found.break_even_truthful == pytest.approx(1.5)
    assert f"on {start:.0%} of the stories" in found.advice and said in found.advice
    assert f"on {truthful:.0%} with truthful ones" in found.advice and "frozen" not in found.advice


@pytest.mark.parametrize("named", by_default([0, 5], 5))
def test_baited_stories_whose_rules_name_no_rival_are_left_out(make_game, scripted, named):
    pipeline, stories = make_game()
    records = [r for r in stories.train if stories.prompts.rules.rival(r)][:12]

    class Half(type(stories.prompts.rules)):
        def rival(self, record):
            return super().rival(record) if record in records[:named] else None

    scripted(lambda prompt, sample: " nothing")
    prompts = replace(stories.prompts, rules=Half())
    reward = FakeReward(records, stories.prompts, bait=3.0)
    game = replace(pipeline, prompts=prompts, reward_model=reward, judge=FakeJudge(0.9))
    found = measure_break_even(game, records, seed=0)
    # Without any rival it is measured on all stories, with the wrong answer that the reward model likes most.
    assert found.stories == (named or 12) and found.delta_reward == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("settings", "costs", "gains", "weight"),
    [
        ({}, [1.0] * 10, [0.5] * 10, 4.0),  # break-even 1 / 0.5 everywhere, twice that
        # Means 1 and 0.5 again, but on two stories the break-even is 2.6 / 0.52 = 5: 1 % above that.
        ({}, [0.6] * 8 + [2.6] * 2, [0.495] * 8 + [0.52] * 2, 5.05),
        ({"break_even_share": 0.8}, [0.6] * 8 + [2.6] * 2, [0.495] * 8 + [0.52] * 2, 4.0),
        ({"break_even_share": 0}, [0.6] * 8 + [2.6] * 2, [0.495] * 8 + [0.52] * 2, 4.0),
        # A weight cannot help where a truthful critique lowers the judge's score: 2 · 10 / 4.4, doubled.
        ({}, [1.0] * 10, [0.5] * 9 + [-0.1], 2 * 2 * 10 / 4.4),
        ({"w_reward": 2}, [0.6] * 8 + [2.6] * 2, [0.495] * 8 + [0.52] * 2, 10.1),
        ({}, [-1.0] * 10, [0.5] * 10, 1.0),  # nothing to outweigh: the reward model's weight
        # So on average, but two of ten stories need 0.9 / 0.5 = 1.8, or 1.5 / 0.5 = 3, above twice 1.
        ({}, [-1.0] * 8 + [0.9] * 2, [0.5] * 10, 1.818),
        ({}, [-1.0] * 8 + [1.5] * 2, [0.5] * 10, 2.0),
        # The judge prefers the wrong answer on one, the reward model the right one by more than twice that.
        ({}, [-1.0] * 9 + [0.9], [-0.4] + [0.5] * 9, 1.818),
        ({}, [1.0] * 10, None, 1.0),
        ({"w_reward": 0}, [1.0] * 10, [0.5] * 10, 1.0),
    ],
)
def test_the_default_weight_by_hand(settings, costs, gains, weight):
    known = None if gains is None else torch.tensor(gains)
    assert default_weight(GameConfig(**settings), torch.tensor(costs), known) == pytest.approx(weight)


@pytest.mark.parametrize("factor", by_default([0.5, 2.0], 0.5))
def test_a_game_without_reward_has_a_judge_all_the_same(make_game, scripted, factor):
    scripted(lambda prompt, sample: " nothing")
    found = check(*make_game("game.w_reward=0", f"game.break_even_factor={factor}"), bait=3.0, believed=0.9)
    # Nothing to outweigh: break-even 0, and factor · 0 would leave the policy without any reward.
    assert found.break_even_truthful == 0.0 and found.w_judge == 1.0
    assert (found.pays_start, found.pays_truthful) == (0.0, 1.0)


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
    assert "does not tell right answers from wrong ones" in found.advice
    assert found.judge_reads is False and why_impossible(found, ReadRates(1, 1)) == [found.advice]


def test_a_reward_model_that_is_right_on_average_may_still_be_outweighed(make_game, scripted):
    """It likes the bait on a quarter of the stories: ΔR is 1.2 there and -1 elsewhere, -0.45 on average."""
    scripted(lambda prompt, sample: " nothing")
    pipeline, stories = make_game()
    records = [record for record in stories.train if stories.prompts.rules.rival(record)][:16]
    reward = FakeReward(records, stories.prompts, bait=0.0)
    flawed = FakeReward(records, stories.prompts, bait=2.2)
    flaws = {stories.prompts.policy(record) for record in records[:4]}

    class Mixed(FakeReward):
        def _one(self, prompt, completion):
            return (flawed if prompt in flaws else reward)._one(prompt, completion)

    mixed = Mixed(records, stories.prompts, bait=0.0)
    game = replace(pipeline, reward_model=mixed, judge=FakeJudge(0.9))
    found = measure_break_even(game, records, seed=0)
    assert found.delta_reward == pytest.approx(-0.45)
    # ΔJ is 0.8 with truthful critiques, so the largest break-even is 1.2 / 0.8; the weight is 1% above it.
    assert found.w_judge == pytest.approx(1.01 * 1.5)
    assert (found.pays_start, found.pays_truthful) == (0.75, 1.0)
    assert "only a better monitor" in found.advice


@pytest.mark.parametrize(
    ("bait", "said"), [(0.25, "already prefers right answers"), (1.0, "only a better monitor makes it pay")]
)
def test_a_reward_model_without_a_flaw_leaves_nothing_to_outweigh(game, scripted, bait, said):
    scripted(lambda prompt, sample: " nothing")
    found = check(*game, bait=bait, believed=0.9)
    assert found.delta_reward == bait - 1
    assert found.break_even_truthful == 0.0 and found.w_judge == 1.0
    assert said in found.advice


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
    scaled, read = measure_scales(pipeline, stories.train[:16], seed=0)
    answers = scaled.answer(scaled.players.policy, stories.train[:16], 1, seed=0)
    critiques = scaled.criticise(stories.train[:16], answers, 1, seed=0)
    for scores in (
        scaled.rewards(stories.train[:16], answers),
        scaled.judge_scores(stories.train[:16], answers, critiques),
    ):
        assert scores.mean() == pytest.approx(0, abs=1e-5) and scores.std() == pytest.approx(1, abs=1e-4)
    again, _ = measure_scales(scaled, stories.train[:16], seed=0)
    assert 0 <= read.answers <= 1 and read.critiques == sum(c.parsed is not None for c in critiques) / 16
    assert again.reward_scale == scaled.reward_scale and again.judge_scale == scaled.judge_scale


@pytest.mark.parametrize(
    ("gains", "chance"),
    [
        # mean 0.5, deviation 0.5: two standard errors of 4 are 0.5, of 16 are 0.25
        ([0.0, 1.0] * 2, True),
        ([0.0, 1.0] * 8, False),
        ([0.0, -1.0] * 8, True),
        ([0.2] * 3, False),
        ([0.0], True),
    ],
)
def test_a_mean_gain_within_two_standard_errors_is_chance(gains, chance):
    assert _is_chance(torch.tensor(gains)) is chance
