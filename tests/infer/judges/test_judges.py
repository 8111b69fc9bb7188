"""Judges: alone, in both orders, and as reward functions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lively import lively
from raises import raises_error
from rlhf_infer import Judge, PairwiseJudge, PromptedJudge, RuleJudge, verdict_rule
from rlhf_infer.judges.pairwise import PAIR_NUMBER_TEMPLATE, PAIR_TEMPLATE
from rlhf_models import tiny_model, train_byte_tokenizer

TEMPLATE = "{question}|{answer}|{critique}?"
QUESTIONS = ["where is mary", "where is mary", "who", "where is mary"]
ANSWERS = ["kitchen", "kitchen", "the ball, {braces} and ünïcode", "garden"]
CRITIQUES = ["went to kitchen", None, "so wrong", "none"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_byte_tokenizer([" yes no yes no"], 270)


@pytest.fixture(scope="module")
def model() -> Any:
    return lively(tiny_model("llama", vocab_size=270))


def seq_prob(model: Any, tokenizer: Any, prompt: str, spelling: str) -> Any:
    """Probability of a spelling after a prompt, from a plain forward of this one text."""
    ids, tail = tokenizer(prompt)["input_ids"], tokenizer(spelling)["input_ids"]
    logps = model(input_ids=torch.tensor([ids + tail])).logits[0].log_softmax(-1)
    return torch.stack([logps[len(ids) - 1 + i, token] for i, token in enumerate(tail)]).sum().exp()


@torch.no_grad()
def by_hand(model: Any, tokenizer: Any, yes: list[str], no: list[str]) -> torch.Tensor:
    scores = []
    for question, answer, critique in zip(QUESTIONS, ANSWERS, CRITIQUES, strict=True):
        prompt = f"{question}|{answer}|{critique or 'none'}?"
        p_yes = sum(seq_prob(model, tokenizer, prompt, text) for text in yes)
        p_no = sum(seq_prob(model, tokenizer, prompt, text) for text in no)
        scores.append(p_yes / (p_yes + p_no))
    return torch.stack(scores)


@pytest.mark.parametrize(("yes", "no"), [(" yes", " no"), ([" yes", "True!"], [" no", "False", "N"])])
@pytest.mark.parametrize("max_tokens", [None, 25])
def test_prompted_judge_reads_yes_against_no(
    model: Any, tokenizer: Any, yes: str | list[str], no: str | list[str], max_tokens: int | None
) -> None:
    judge = PromptedJudge(model, tokenizer, template=TEMPLATE, yes=yes, no=no, max_tokens=max_tokens)
    scores = judge.score(QUESTIONS, ANSWERS, CRITIQUES)
    spelled = [[x] if isinstance(x, str) else x for x in (yes, no)]
    torch.testing.assert_close(scores, by_hand(model, tokenizer, *spelled), rtol=0, atol=1e-5)
    assert scores.dtype == torch.float32 and not scores.requires_grad
    assert scores.max() - scores.min() > 0.01
    swapped = PromptedJudge(model, tokenizer, template=TEMPLATE, yes=no, no=yes)
    torch.testing.assert_close(swapped.score(QUESTIONS, ANSWERS, CRITIQUES), 1 - scores, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def chat_tokenizer() -> Any:
    """Two forms of yes are one token each, and four of no."""
    tokenizer = train_byte_tokenizer([" yes no" * 40 + " No " * 10, "yesyes nono " * 20], 300)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return tokenizer


@torch.no_grad()
def test_in_a_chat_the_reply_is_read_in_every_form_that_is_one_token(chat_tokenizer: Any) -> None:
    words = {"yes": (" yes", "yes", " Yes", "Yes"), "no": (" no", "no", " No", "No")}
    short = {
        word: [form for form in forms if len(chat_tokenizer(form)["input_ids"]) == 1]
        for word, forms in words.items()
    }
    assert short == {"yes": [" yes", "yes"], "no": [" no", "no", " No", "No"]}
    model = lively(tiny_model("llama", vocab_size=len(chat_tokenizer)))
    judge = PromptedJudge(model, chat_tokenizer, template=TEMPLATE, chat=True, max_tokens=40)
    expected = []
    for question, answer, critique in zip(QUESTIONS, ANSWERS, CRITIQUES, strict=True):
        # P(true) = Σ yes / (Σ yes + Σ no) at the first token of the reply to the user's message.
        asked = f"<user>{question}|{answer}|{critique or 'none'}?<assistant>"
        ids = torch.tensor([chat_tokenizer(asked)["input_ids"]])
        first = model(input_ids=ids).logits[0, -1].softmax(-1)
        p_yes, p_no = (
            sum(first[chat_tokenizer(form)["input_ids"][0]] for form in short[word]) for word in ("yes", "no")
        )
        expected.append(p_yes / (p_yes + p_no))
    scores = judge.score(QUESTIONS, ANSWERS, CRITIQUES)
    torch.testing.assert_close(scores, torch.stack(expected), rtol=0, atol=1e-5)
    plain = PromptedJudge(model, chat_tokenizer, template=TEMPLATE)
    assert (scores - plain.score(QUESTIONS, ANSWERS, CRITIQUES)).abs().max() > 0.01
    by_hand_plain = by_hand(model, chat_tokenizer, [" yes"], [" no"])
    torch.testing.assert_close(plain.score(QUESTIONS, ANSWERS, CRITIQUES), by_hand_plain, rtol=0, atol=1e-5)


def test_in_a_chat_a_word_without_a_token_is_read_whole(model: Any) -> None:
    tokenizer = train_byte_tokenizer(["x"], 259)  # a token for every byte, and no other
    tokenizer.chat_template = "{{ messages[0]['content'] }}>"
    scores = PromptedJudge(model, tokenizer, template=TEMPLATE, chat=True).score(["q"], ["a"], ["c"])
    with torch.no_grad():
        p_yes, p_no = (seq_prob(model, tokenizer, "q|a|c?>", word) for word in ("yes", "no"))
    torch.testing.assert_close(scores[0], p_yes / (p_yes + p_no), rtol=0, atol=1e-5)


def test_single_and_several_tokens_are_both_covered(tokenizer: Any) -> None:
    assert [len(tokenizer(text)["input_ids"]) for text in (" no", "False")] == [1, 5]


def test_a_missing_critique_reads_as_the_stand_in(model: Any, tokenizer: Any) -> None:
    judge: Judge = PromptedJudge(model, tokenizer, template=TEMPLATE, no_critique="nothing said")
    missing, given = judge.score(["q", "q"], ["a", "a"], [None, "nothing said"])
    assert missing == given


def test_no_rows_give_no_scores(model: Any, tokenizer: Any) -> None:
    assert PromptedJudge(model, tokenizer).score([], [], []).shape == (0,)
    assert RuleJudge().score([], [], []).shape == (0,)


def test_prompted_judge_refusals(model: Any, tokenizer: Any) -> None:
    with raises_error("unknown_field"):
        PromptedJudge(model, tokenizer, template="{story} {answer}")
    with raises_error("malformed_template"):
        PromptedJudge(model, tokenizer, template="{answer")
    with raises_error("overlapping_spellings"):
        PromptedJudge(model, tokenizer, yes=" not", no=" no")
    with raises_error("overlapping_spellings"):
        PromptedJudge(model, tokenizer, yes="", no=" no")
    with raises_error("no_chat_template"):
        PromptedJudge(model, tokenizer, chat=True)
    with raises_error("context_too_short", limit=128):
        PromptedJudge(model, tokenizer).score(["q"], ["a" * 200], [None])


@pytest.mark.parametrize(
    ("critique", "expected"),
    [
        (None, 0.5),
        ("", 0.5),
        ("mary went to kitchen .", 0.5),
        ("the upright, rightly wronged", 0.5),
        ("mary went to kitchen . so right", 1.0),
        ("mary went to garden . so WRONG.", 0.0),
        ("looks right at first, but wrong", 0.0),
        ("this is not right", 0.0),
        ("not wrong", 1.0),
    ],
)
def test_verdict_rule(critique: str | None, expected: float) -> None:
    assert verdict_rule("where is mary", "right here", critique) == expected


def test_rule_judge_applies_the_rule_to_each_row() -> None:
    def rule(question: str, answer: str, critique: str | None) -> float:
        return (len(question) + 2 * len(answer) + 4 * (critique is None)) / 10

    scores = RuleJudge(rule).score(["q", "qq"], ["a", "a"], [None, "c"])
    torch.testing.assert_close(scores, torch.tensor([0.7, 0.4]))
    assert RuleJudge().score(["q"], ["a"], ["so right"]).tolist() == [1.0]


@pytest.mark.parametrize("value", [1.5, -0.1, float("nan"), None, "0.5"])
def test_a_rule_that_returns_no_probability_is_named(value: Any) -> None:
    def broken(question: str, answer: str, critique: str | None) -> Any:
        return value

    with raises_error("invalid_score"):
        RuleJudge(broken).score(["q"], ["a"], [None])


def test_an_exception_in_a_rule_says_where() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        RuleJudge(lambda question, answer, critique: 1 / 0).score(["q"], ["a"], ["c"])
    assert caught.value.__notes__ == ["judge rule <lambda>, question 'q', answer 'a', critique 'c'"]


def test_a_preference_for_a_place_cancels() -> None:
    # p(x, y) = 0.6 + 0.2 (len x - len y): 0.1 more than its merit for whoever stands first.
    judge = PairwiseJudge(RuleJudge(lambda q, a, b: 0.6 + 0.2 * (len(a) - len(b or ""))))
    found = judge.compare(["q"] * 3, ["aa", "a", "a"], ["b", "b", "bb"])
    assert found.probability.tolist() == pytest.approx([0.7, 0.5, 0.3])
    assert found.first_position.tolist() == pytest.approx([0.2, 0.2, 0.2])
    always = PairwiseJudge(RuleJudge(lambda q, a, b: 1.0)).compare(["q"], ["a"], ["b"])
    assert always.probability.tolist() == [0.5] and always.first_position.tolist() == [1.0]


def test_an_api_is_asked_about_both_orders(fake: Any) -> None:
    def reply(handler: Any, text: str) -> None:
        good_first = text.index("good") < text.index("poor")
        fake.send(handler, fake.completion("90%" if good_first else "30"))

    with fake.serve(reply) as server:
        api = fake.judge(server, answer="number", template=PAIR_NUMBER_TEMPLATE)
        found = PairwiseJudge(api).compare(["q"], ["good"], ["poor"])
    assert len(server.requests) == 2
    assert found.probability.tolist() == pytest.approx([(0.9 + 1 - 0.3) / 2])


def test_a_pair_of_which_one_order_is_unreadable_has_no_score(fake: Any) -> None:
    def reply(handler: Any, text: str) -> None:
        good_first = text.index("good") < text.index("poor")
        fake.send(handler, fake.completion("90%" if good_first else "hard to say"))

    with fake.serve(reply) as server:
        api = fake.judge(server, answer="number", template=PAIR_NUMBER_TEMPLATE)
        [probability] = PairwiseJudge(api).compare(["q"], ["good"], ["poor"]).probability.tolist()
    assert math.isnan(probability)


def test_a_model_on_this_machine(lively_model: Any, byte_tokenizer: Any) -> None:
    model = lively_model(vocab_size=len(byte_tokenizer))
    judge = PairwiseJudge(PromptedJudge(model, byte_tokenizer, template=PAIR_TEMPLATE[-120:]))
    there = judge.compare(["q"], ["a"], ["b"]).probability
    back = judge.compare(["q"], ["b"], ["a"]).probability
    assert (there + back).tolist() == pytest.approx([1.0])
