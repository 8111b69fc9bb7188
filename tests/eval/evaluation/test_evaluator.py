"""The evaluator on tiny models: KL, resuming, verdicts, accuracies."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch

from raises import raises_error
from rlhf_data import PreferenceRecord, PromptRecord, TokenSequence
from rlhf_eval import stats
from rlhf_eval.evaluation import (
    EvalConfig,
    PairJudge,
    Place,
    RLHFEvaluator,
    Written,
    judge_agreement,
    measure_against,
    pair_judges,
    trade_off,
)
from rlhf_eval.evaluation.divergence import divergences
from rlhf_eval.evaluation.ledger import Ledger
from rlhf_eval.evaluation.measures import hard
from rlhf_eval.evaluation.pair_judges import Verdicts
from rlhf_eval.evaluation.written import as_read
from rlhf_eval.scoring import Scorer
from rlhf_models import PolicyModel, build_tiny_llama

PROMPTS = ["where is mary ?", "where is the ball ?", "who went to the garden ?"]
CONFIG = EvalConfig(max_new_tokens=6, num_samples=2, gen_batch_size=2)


@pytest.fixture(scope="module")
def policies(byte_tokenizer):
    end = byte_tokenizer.eos_token_id
    models = [
        build_tiny_llama(len(byte_tokenizer), hidden_size=32, eos_token_id=end, seed=seed) for seed in (0, 1)
    ]
    with torch.no_grad():  # a distribution that is far from flat
        for model in models:
            model.lm_head.weight.mul_(8)
    return [PolicyModel(model, byte_tokenizer) for model in models]


def by_length(batch):
    return np.array([[len(text) for text in batch.completions]], dtype=float)


LENGTH = Scorer("length", by_length, reads_chat=False)


def test_the_kl_is_the_enumerated_one(policies):
    """Σ_y π(y) log π(y)/π_ref(y) over all completions y of two tokens out of the first 12."""
    policy, reference = (each.model for each in policies)
    prompt, some = [5, 6, 7], range(12)
    completions = list(itertools.product(some, some))
    sequences = [TokenSequence([*prompt, *each], len(prompt)) for each in completions]
    found = dict(divergences(policy, reference, sequences, max_tokens=64))
    with torch.no_grad():
        ours, theirs = (
            model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).double()
            for model in (policy, reference)
        )
        # Of the first token, over the whole vocabulary; of the second one, given each first.
        first = float((ours.exp() * (ours - theirs)).sum())
        for token in some:
            rows = torch.tensor([[*prompt, token]])
            p, q = (model(rows).logits[0, -1].log_softmax(-1).double() for model in (policy, reference))
            second = float((p.exp() * (p - q)).sum())
            divergence = found[completions.index((token, 3))]
            assert divergence.kl == pytest.approx(first + second, abs=1e-5)
            assert divergence.entropy == pytest.approx(
                float(-(ours.exp() * ours).sum() - (p.exp() * p).sum()), abs=1e-5
            )
            ratio = float(ours[token] - theirs[token] + p[3] - q[3])
            assert divergence.k1 == pytest.approx(ratio, abs=1e-5)
            terms = [float(theirs[token] - ours[token]), float(q[3] - p[3])]
            assert divergence.k3 == pytest.approx(sum(math.expm1(x) - x for x in terms), abs=1e-4)
    assert all(each.tokens == 2 and each.kl > 0 for each in found.values())


def test_texts_go_on_after_their_prompts(policies):
    tokenizer = policies[0].tokenizer
    evaluator = RLHFEvaluator(policies[0], prompts=PROMPTS, config=CONFIG)
    for prompt, written in zip(PROMPTS, evaluator.completions()[::2], strict=True):
        assert written.ids is not None
        whole = tokenizer.decode([*tokenizer(prompt)["input_ids"], *written.ids], skip_special_tokens=True)
        assert prompt + written.text == whole


def test_a_policy_is_at_no_distance_from_itself(policies):
    evaluator = RLHFEvaluator(policies[0], policies[0], LENGTH, PROMPTS, config=CONFIG)
    found = evaluator.evaluate()
    assert found["kl"]["kl"]["estimate"] == pytest.approx(0, abs=1e-6)
    assert found["kl"]["k3"]["estimate"] == pytest.approx(0, abs=1e-6)
    assert found["against"]["reward"]["estimate"] == 0
    json.dumps(found, allow_nan=False)


def test_an_interrupted_evaluation_goes_on(policies, tmp_path, monkeypatch):
    def evaluator(folder):
        place = Place("policy", folder)
        return RLHFEvaluator(policies[0], policies[1], LENGTH, PROMPTS, config=CONFIG, place=place)

    whole = evaluator(tmp_path / "whole").evaluate()
    cut = evaluator(tmp_path / "cut")
    add, calls = Ledger.add, []

    def interrupted(self, rows):
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        add(self, rows)

    monkeypatch.setattr(Ledger, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cut.completions()
    monkeypatch.undo()
    file = tmp_path / "cut" / "completions.jsonl"
    assert len(file.read_text().splitlines()) == 4  # two prompts, two samples each
    with file.open("a") as half:
        half.write('{"key": "2/0", "te')
    assert evaluator(tmp_path / "cut").evaluate() == whole
    assert len(file.read_text().splitlines()) == 6


def test_a_damaged_ledger_is_named(tmp_path):
    path = tmp_path / "rewards.jsonl"
    path.write_text('{"key": "0", "scores": [1]}\n[3]\n')
    with raises_error("damaged_file", line=2):
        Ledger(path)


def test_what_was_written_elsewhere_is_scored_and_judged():
    ours = RLHFEvaluator(None, None, LENGTH, PROMPTS, config=EvalConfig(), place=Place("ours"))
    theirs = RLHFEvaluator(None, None, LENGTH, PROMPTS, config=EvalConfig(), place=Place("theirs"))
    ours.with_completions([[Written("aaa")], [Written("bb")], [Written("c")]])
    theirs.with_completions([[Written("a")], [Written("bb")], [Written("ccc")]])
    judge = PairJudge("longer", "longer", _longer(), has_order=True)
    found = measure_against(ours, theirs, [judge])
    assert found["reward"]["estimate"] == 0  # (2 + 0 - 2) / 3
    assert found["judges"]["longer"]["win_rate"]["estimate"] == 0.5  # a win, a tie, a loss
    assert found["judges"]["longer"]["bias"]["estimate"] == 0
    with raises_error("missing_completion"):
        RLHFEvaluator(None, prompts=PROMPTS).completions()


def test_a_judge_that_likes_the_first_answer_is_seen_and_cancels():
    """It takes the first answer whenever both are equally good, and half of all times else."""
    rng = np.random.default_rng(0)
    n, p = 4000, 0.6
    better = rng.random(n) < p

    def verdicts(shown_first):
        biased = rng.random(n) < 0.3
        return np.where(biased, float(shown_first), better.astype(float))

    found = Verdicts(verdicts(True), verdicts(False))
    order = stats.position_bias(found.ahead, found.behind)
    assert order.bias.low <= 0.15 <= order.bias.high  # of 30% biased verdicts half would be for it anyway
    # E = .7·.6 + .3·(1 + 0)/2 = .57: shrunk towards one half, and not towards either answer.
    rate = stats.win_rate(found.ahead, found.behind)
    assert rate.low <= 0.57 <= rate.high


@pytest.mark.slow
def test_labels_correct_a_judge_that_errs():
    rng = np.random.default_rng(1)
    n = 2000
    truth = {f"q{i}": rng.random() < 0.7 for i in range(n)}  # the first model's answer is better in 70%
    config = EvalConfig()
    ours, theirs = (
        RLHFEvaluator(None, prompts=list(truth), config=config, place=Place(name)) for name in ("a", "b")
    )
    ours.with_completions([[Written("good" if good else "bad")] for good in truth.values()])
    theirs.with_completions([[Written("bad" if good else "good")] for good in truth.values()])

    def errs(questions, firsts, seconds):
        wrong = [hash_share(question, "err") < 0.2 for question in questions]
        right = [first == "good" for first in firsts]
        values = np.array([float(a != b) for a, b in zip(right, wrong, strict=True)])
        return Verdicts(values, values)

    labels = [PreferenceRecord(f"l{i}", "good", "bad") for i in range(1000)]
    judge = PairJudge("errs", "errs", errs, has_order=True)
    found = measure_against(ours, theirs, [judge], labels=labels)["judges"]["errs"]
    # .7·.8 + .3·.2 = .62 seen; .7 behind it.
    assert found["win_rate"]["low"] <= 0.62 <= found["win_rate"]["high"]
    assert found["corrected"]["low"] <= 0.7 <= found["corrected"]["high"]
    assert found["labels"]["agreement"] == pytest.approx(0.8, abs=0.04)


def hash_share(*texts):
    import hashlib

    return int.from_bytes(hashlib.blake2b("".join(texts).encode(), digest_size=4).digest()) / 2**32


def test_a_reward_as_judge_reads_chats_as_the_reward_does():
    """Messages get the score 1 per letter, and texts, in which none were trained, the opposite."""

    def scores(batch):
        signs = [1 if isinstance(prompt, list) else -1 for prompt in batch.prompts]
        said = [each[0]["content"] if isinstance(each, list) else each for each in batch.completions]
        return np.array([[sign * len(text) for sign, text in zip(signs, said, strict=True)]], dtype=float)

    chat = Scorer("chat", scores, reads_chat=True)
    prompts = [PromptRecord([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    made = [RLHFEvaluator(None, None, chat, prompts, config=EvalConfig(), place=Place(name)) for name in "ab"]
    for each, texts in zip(made, (("aaa", "bb", "cc"), ("a", "b", "c")), strict=True):
        each.with_completions([[Written(text)] for text in texts])
    labels = [
        PreferenceRecord(
            [{"role": "user", "content": f"q{i}"}],
            [{"role": "assistant", "content": "long"}],
            [{"role": "assistant", "content": "no"}],
        )
        for i in range(8)
    ]
    judge = pair_judges._by_score(chat)
    found = measure_against(made[0], made[1], [judge], labels=labels)
    assert found["reward"]["estimate"] == pytest.approx(4 / 3)
    assert found["judges"]["chat"]["win_rate"]["estimate"] == 1
    assert found["judges"]["chat"]["labels"]["agreement"] == 1


def test_unread_verdicts_do_not_count():
    def compare(questions, firsts, seconds):
        values = np.array([math.nan, 1.0, 1.0])
        return Verdicts(values, values)

    ours, theirs = (
        RLHFEvaluator(None, prompts=PROMPTS, config=EvalConfig(), place=Place(name)) for name in ("a", "b")
    )
    for each in (ours, theirs):
        each.with_completions([[Written("x")]] * 3)
    judge = PairJudge("j", "j", compare, has_order=True)
    found = measure_against(ours, theirs, [judge])["judges"]["j"]
    assert (found["prompts"], found["unread"], found["win_rate"]["estimate"]) == (2, 1, 1.0)


def test_implicit_rewards_are_log_ratios(policies):
    pairs = [PreferenceRecord(PROMPTS[0], " in the garden", " in the kitchen")]
    evaluator = RLHFEvaluator(policies[0], policies[1], LENGTH, PROMPTS, config=CONFIG)
    right = evaluator.reward_accuracy(pairs)
    assert right["reward"].tolist() == [0.0]  # "kitchen" is one character longer than "garden"
    own = evaluator.implicit_accuracy(pairs)
    back = RLHFEvaluator(policies[1], policies[0], None, PROMPTS, config=CONFIG).implicit_accuracy(pairs)
    assert own is not None and back is not None and own[0] == 1 - back[0]  # the opposite ratio
    assert RLHFEvaluator(policies[0], prompts=PROMPTS).implicit_accuracy(pairs) is None


def test_what_nothing_beats():
    def model(name, kl, reward):
        return {"name": name, "kl": {"kl": {"estimate": kl}}, "reward": {"mean": {"estimate": reward}}}

    start = {"name": "start", "reward": {"mean": {"estimate": 0.0}}}
    found = trade_off([model("near", 1, 2), model("far", 4, 3), model("worse", 5, 1)], start)
    assert found is not None and found["front"] == ["start", "near", "far"]
    # Corner (-5, 0): near covers 4·2, far 1·3, of which 1·2 together: 9.
    assert found["hypervolume"] == pytest.approx(9)
    assert trade_off([], start) is None


def test_prompts_as_rewards_read_them():
    chat = [{"role": "user", "content": "q"}]
    assert as_read(False, chat, "a") == ("user: q\nassistant:", "a")
    assert as_read(True, chat, "a") == (chat, [{"role": "assistant", "content": "a"}])
    talk = "\n\nHuman: q\n\nAssistant:"
    assert as_read(True, talk, " a")[0] == chat and as_read(False, talk, " a") == (talk, " a")
    assert as_read(True, "plain", "a") == ("plain", "a")


def test_verdicts_are_decided_and_judges_compared():
    assert hard(np.array([0.9, 0.5, 0.1])).tolist() == [1.0, 0.5, 0.0]
    same = Verdicts(np.array([0.9, 0.1, 0.8]), np.array([0.7, 0.2, 0.9]))
    [found] = judge_agreement({"a": same, "b": same})
    assert found["kappa"]["estimate"] == 1.0


def test_columns_reach_the_reward():
    seen = {}

    def answers(batch):
        seen.update(batch.columns)
        return np.zeros((1, len(batch.completions)))

    scorer = Scorer("answers", answers, reads_chat=False)
    prompts = [PromptRecord("q", {"answer": "4"}), PromptRecord("r", {"answer": "5"})]
    evaluator = RLHFEvaluator(None, None, scorer, prompts, config=EvalConfig())
    evaluator.with_completions([[Written("x")], [Written("y")]]).scores()
    assert seen["answer"] == ["4", "5"]


def _longer():
    def compare(questions, firsts, seconds):
        values = [0.5 + 0.5 * np.sign(len(a) - len(b)) for a, b in zip(firsts, seconds, strict=True)]
        return Verdicts(np.array(values), np.array(values))

    return compare
