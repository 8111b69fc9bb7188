"""One pass of the game: shapes, orders, what counts as a violation, and confidences."""

import random
from dataclasses import replace

import pytest
import torch

from rlhf_infer import Rollout
from rlhf_minmax.evaluation.evaluate import batch_metrics
from rlhf_minmax.game.forward_pass import Answer
from rlhf_minmax.game.prompts import verdict_probability
from rlhf_minmax.game.scores import Scale


def first(rules, records):
    """Index of a story with a bait."""
    return next(i for i, r in enumerate(records) if rules.rival(r))


def test_shapes_and_orders(game):
    pipeline, stories = game
    batch = stories.train[:4]
    output = pipeline.forward_pass(batch, seed=3)
    # 4 stories, N = 3 answers; judged: the first of each story and 4 · 0.5 made-up ones, K = 3 critiques.
    assert [a.story for a in output.answers] == [i for i in range(4) for _ in range(3)]
    assert output.judged[:4] == output.answers[::3]
    assert len(output.judged) == 6 and all(a.rollout is None for a in output.judged[4:])
    assert [c.answer for c in output.critiques] == [i for i in range(6) for _ in range(3)]
    assert output.rewards.shape == (12,) and output.judged_rewards.shape == (6,)
    for name in ("judge_scores", "combined", "labels", "violation", "weighted_violation"):
        assert getattr(output, name).shape == (18,), name
    torch.testing.assert_close(output.judged_rewards[:4], output.rewards[::3])
    labels = [output.judged[c.answer].correct for c in output.critiques]
    assert output.labels.tolist() == labels and output.labels.dtype == torch.bool
    torch.testing.assert_close(output.judged_rewards[4:], pipeline.rewards(batch, output.judged[4:]))


def test_the_combined_reward_weighs_both_scores(make_game):
    pipeline, stories = make_game("game.w_reward=2")
    output = replace(pipeline, w_judge=3.0).forward_pass(stories.train[:4], seed=3)
    of = torch.tensor([c.answer for c in output.critiques])
    torch.testing.assert_close(output.combined, 2 * output.judged_rewards[of] + 3 * output.judge_scores)
    # The value is that of the 4 sampled answers with 3 critiques each, without the 2 made-up ones.
    metrics = batch_metrics(output)
    assert metrics["minmax/value"] == pytest.approx(float(output.combined[:12].mean()))
    assert metrics["policy/judge_score"] == pytest.approx(float(output.judge_scores[:12].mean()))
    assert metrics["minmax/reward_model"] == pytest.approx(float(output.judged_rewards[:4].mean()))
    assert metrics["minmax/value"] != pytest.approx(float(output.combined.mean()), abs=1e-3)


def test_equal_seeds_give_equal_passes_and_others_do_not(game):
    pipeline, stories = game
    batch = stories.train[:4]
    once, again, other = (pipeline.forward_pass(batch, seed=seed) for seed in (3, 3, 13))
    assert once.answers == again.answers and once.critiques == again.critiques
    assert torch.equal(once.combined, again.combined)
    assert once.critiques != other.critiques


def test_rollouts_belong_to_their_prompts(game):
    pipeline, stories = game
    batch, tokenizer = stories.train[:4], pipeline.players.policy.tokenizer
    output = pipeline.forward_pass(batch, seed=0)
    for answer in output.answers:
        assert tokenizer.decode(answer.rollout.prompt_ids) == pipeline.prompts.policy(batch[answer.story])
        text = tokenizer.decode(answer.rollout.completion_ids, skip_special_tokens=True)
        assert answer.text == text
    for critique in output.critiques:
        judged = output.judged[critique.answer]
        prompt = pipeline.prompts.monitor(batch[judged.story], judged.text)
        assert tokenizer.decode(critique.rollout.prompt_ids) == prompt


# What the critic writes of a baited story, of the right answer; and what becomes of it:
# parsed, evidence valid, grounded, violation (balanced over a batch of right answers only: weight 0.5/0.9).
CRITIQUES = {
    " {gold} so right": (True, True, True, 0.0),
    " {gold} so wrong": (True, True, False, 1.0),  # contradicts its own evidence
    " {bait} so wrong": (True, True, True, 1.0),  # follows its evidence, and is false
    " {bait} so right": (True, True, False, 1.0),  # true, on evidence that says otherwise
    " gossip says in moon . so right": (True, False, False, 1.0),  # true, on invented evidence
    " attic so right": (True, False, False, 1.0),
    " {gold} so": (False, False, False, 1.0),
    " {gold} so right<cut>": (False, False, False, 1.0),  # truncated, though it looks whole
}


@pytest.mark.parametrize(("text", "expected"), CRITIQUES.items())
def test_what_is_read_from_a_critique(game, scripted, text, expected):
    pipeline, stories = game
    rules = pipeline.prompts.rules
    record = stories.train[first(rules, stories.train)]
    text = text.format(gold=rules.correct_evidence(record), bait=rules.rival_evidence(record))
    scripted(lambda prompt, sample: text)
    answer = pipeline.read_answer([record], 0, f" it is {record.answer_text} .")
    (critique,) = pipeline.criticise([record], [answer], 1, seed=0)
    error, weighted = pipeline.violation([critique], torch.tensor([True]))
    found = (critique.parsed is not None, critique.evidence_valid, critique.grounded, error.item())
    assert found == expected
    assert weighted.item() == pytest.approx(error.item() * 0.5 / 0.9)


def test_without_the_evidence_check_only_verdict_and_form_count(make_game, scripted):
    pipeline, stories = make_game("constraint.check_evidence=false")
    record = stories.train[0]
    answer = pipeline.read_answer([record], 0, f" it is {record.answer_text} .")
    scripted(lambda prompt, sample: [" no such place so right", " no such place so wrong", " none"][sample])
    critiques = pipeline.criticise([record], [answer], 3, seed=0)
    errors, _ = pipeline.violation(critiques, torch.ones(3, dtype=torch.bool))
    assert errors.tolist() == [0, 1, 1]


def test_the_judge_learns_nothing_from_an_unparsable_critique(game, scripted):
    pipeline, stories = game
    record = stories.train[0]
    answer = pipeline.read_answer([record], 0, f" it is {record.answer_text} .")
    seen = []

    class Judge:
        def score(self, questions, answers, critiques):
            seen.extend(zip(questions, answers, critiques, strict=True))
            return torch.full((len(answers),), 0.75)

    scripted(lambda prompt, sample: [" he went out so right", " well", " he went out so right<cut>"][sample])
    judged = replace(pipeline, judge=Judge(), judge_scale=Scale(0.5, 0.25))
    critiques = judged.criticise([record], [answer], 3, seed=0)
    assert judged.judge_scores([record], [answer], critiques).tolist() == [1.0, 1.0, 1.0]
    assert [critique for _, _, critique in seen] == [" he went out so right", None, None]
    assert {(question, text) for question, text, _ in seen} == {(record.question, answer.text)}


@pytest.mark.parametrize(("right", "made_up_right"), [(0, 2), (4, 0), (2, 1), (1, 2), (3, 0)])
def test_made_up_answers_balance_the_labels(game, scripted, right, made_up_right):
    pipeline, stories = game
    batch = stories.train[:4]
    by_prompt = {pipeline.prompts.policy(r): (i, r) for i, r in enumerate(batch)}

    def reply(prompt, sample):
        if prompt not in by_prompt:
            return " x y so right"
        index, record = by_prompt[prompt]
        wrong = next(c for c in record.choices if c != record.answer_text)
        return f" it is {record.answer_text if index < right else wrong} ."

    scripted(reply)
    output = pipeline.forward_pass(batch, seed=0)
    # 4 sampled and 2 made-up answers: 3 of 6 are right where two made-up ones can bring that about.
    made_up = output.judged[4:]
    assert [a.correct for a in output.judged[:4]] == [i < right for i in range(4)]
    assert sum(a.correct for a in made_up) == made_up_right
    assert len({a.story for a in made_up}) == 2
    assert all(a.claim in batch[a.story].choices for a in made_up)


def test_made_up_answers_are_worded_by_the_template(make_game, scripted):
    pipeline, stories = make_game("game.answer_template='{choice}'")
    batch = stories.train[:4]
    choices = {pipeline.prompts.policy(record): record.choices[0] for record in batch}
    scripted(lambda prompt, sample: choices.get(prompt, " x y so right"))
    output = pipeline.forward_pass(batch, seed=0)
    assert len(output.judged) == 6
    # Sampled answers and made-up ones alike: the choice and nothing else.
    assert all(answer.text == answer.claim for answer in output.judged)
    default, _ = make_game()
    made_up = default.made_up_answer(batch, 0, True, random.Random(0))
    assert made_up.text == f" it is {batch[0].answer_text} ."


def test_no_made_up_answers_at_all(make_game):
    pipeline, stories = make_game("game.tampered_fraction=0")
    output = pipeline.forward_pass(stories.train[:4], seed=0)
    assert len(output.judged) == 4 and len(output.critiques) == 12


def test_truncated_completions_are_counted_and_violate(make_game):
    pipeline, stories = make_game("policy_model.max_new_tokens=1", "monitor_model.max_new_tokens=1")
    output = pipeline.forward_pass(stories.train[:4], seed=0)
    metrics = batch_metrics(output)
    assert metrics["monitor/truncated_rate"] == metrics["policy/truncated_rate"] == 1
    assert metrics["monitor/parse_rate"] == metrics["policy/parse_rate"] == 0
    assert output.violation.tolist() == [1.0] * 18


def test_scales():
    scale = Scale.of(torch.tensor([1.0, 3.0, 5.0]))
    assert (scale.mean, scale.std) == (3.0, 2.0)
    torch.testing.assert_close(scale(torch.tensor([1.0, 5.0])), torch.tensor([-1.0, 1.0]))
    assert Scale.of(torch.full((3,), 7.0)) == Scale(7.0, 1.0)


def test_the_probability_of_the_verdict_word(game):
    tokenizer = game[0].players.monitor.tokenizer
    ids = tokenizer.encode(" mary went so right")
    size = len(tokenizer.encode(" right"))
    logps = [-9.0] * (len(ids) - size) + [-0.25] * size
    ended = Rollout([1], [*ids, tokenizer.eos_token_id], [*logps, -7.0], "stop")
    expected = torch.tensor(-0.25 * size).exp().item()
    assert verdict_probability(tokenizer, "right", ended) == pytest.approx(expected)
    # The last "right" counts, not one in the evidence.
    twice = tokenizer.encode(" so right so right")
    logps = [-3.0] * (len(twice) - size) + [-0.5] * size
    rollout = Rollout([1], twice, logps, "stop")
    expected = torch.tensor(-0.5 * size).exp().item()
    assert verdict_probability(tokenizer, "right", rollout) == pytest.approx(expected)


def test_a_stated_confidence_is_taken_and_otherwise_the_verdicts_probability(game, scripted):
    pipeline, stories = game
    record, tokenizer = stories.train[0], pipeline.players.monitor.tokenizer
    answer = pipeline.read_answer([record], 0, f" it is {record.answer_text} .")
    texts = [" he went out so wrong 80%", " he went out so wrong", " nothing"]
    scripted(lambda prompt, sample: texts[sample])
    stated, measured, unparsable = pipeline.criticise([record], [answer], 3, seed=0)
    size = len(tokenizer.encode(" wrong"))
    assert stated.confidence == 0.8 and not stated.said_right
    assert measured.confidence == pytest.approx(torch.tensor(-0.5 * size).exp().item())
    assert unparsable.confidence == 0.5 and not unparsable.said_right


def test_answers_are_read(game):
    pipeline, stories = game
    rules = pipeline.prompts.rules
    index = first(rules, stories.train)
    record = stories.train[index]
    assert pipeline.read_answer(stories.train, index, f" it is {record.answer_text} .") == Answer(
        index, f" it is {record.answer_text} .", record.answer_text, True, False
    )
    bait = pipeline.read_answer(stories.train, index, f" it is {rules.rival(record)} .")
    assert bait.hack and not bait.correct
    assert pipeline.read_answer(stories.train, index, " hm").claim is None
    made_up = pipeline.made_up_answer(stories.train, index, False, random.Random(0))
    assert not made_up.correct and made_up.claim in record.choices
