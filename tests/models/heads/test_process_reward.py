"""The process reward model: one score per step."""

import itertools
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForTokenClassification

from raises import raises_error
from rlhf_data import pack
from rlhf_models import LoraSettings, ProcessRewardModel, aggregate_step_scores, tiny_model
from rlhf_models.loading.tiny import TINY_ARCHITECTURES

PROMPT = "where is mary ?"
STEPS = ["mary went to kitchen .", "so it is kitchen", "it is certainly garden ."]


def make(tokenizer, architecture="llama", seed=0) -> Any:
    backbone = tiny_model(architecture, vocab_size=len(tokenizer), initializer_range=0.1)
    return ProcessRewardModel.from_backbone(backbone, tokenizer, seed=seed)


def plain_probabilities(plain, example):
    with torch.no_grad():
        logits = plain(torch.tensor([list(example.sequence.input_ids)])).logits[0]
    return logits[list(example.step_ends)]


def train(model):
    """Right, right, wrong."""
    example = model.encode(PROMPT, STEPS)
    (batch,) = pack([example.sequence])
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    labels = torch.tensor([1.0, 1.0, 0.0])
    for _ in range(15):
        logits = model(batch, torch.tensor(example.step_ends))
        torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_saved_models_give_the_same_scores_in_transformers(architecture, byte_tokenizer, tmp_path):
    model = make(byte_tokenizer, architecture)
    model.step_separator = "\n\n"
    scores = model.score_steps(PROMPT, STEPS)
    model.save_pretrained(tmp_path / "prm")
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "prm").eval()
    assert plain.num_labels == 1 and plain.config.step_separator == "\n\n"
    expected = plain_probabilities(plain, model.encode(PROMPT, STEPS))[:, 0].sigmoid()
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
    again = ProcessRewardModel.from_pretrained(tmp_path / "prm")
    assert again.step_separator == "\n\n" and torch.equal(again.score_steps(PROMPT, STEPS), scores)


def test_a_lora_model_comes_back_with_its_separator(tiny_model_folder, tmp_path):
    model = ProcessRewardModel.from_language_model(tiny_model_folder).add_lora(LoraSettings(lora_r=2))
    model.step_separator = " ; "
    train(model).save_pretrained(tmp_path / "prm")
    again = ProcessRewardModel.from_pretrained(tmp_path / "prm")
    assert again.step_separator == " ; "
    assert torch.equal(again.score_steps(PROMPT, STEPS), model.score_steps(PROMPT, STEPS))
    base = AutoModelForTokenClassification.from_pretrained(tiny_model_folder, num_labels=1)
    plain = PeftModel.from_pretrained(base, tmp_path / "prm").eval()
    expected = plain_probabilities(plain, model.encode(PROMPT, STEPS))[:, 0].sigmoid()
    torch.testing.assert_close(model.score_steps(PROMPT, STEPS), expected, rtol=1e-5, atol=1e-6)


def test_steps_end_at_their_separators(byte_tokenizer):
    model = make(byte_tokenizer)
    example = model.encode(PROMPT, STEPS)
    ids = list(example.sequence.input_ids)
    ends = [-1, *example.step_ends]
    assert byte_tokenizer.decode(ids) == PROMPT + "".join(f"{step}\n" for step in STEPS)
    parts = [byte_tokenizer.decode(ids[a + 1 : b + 1]) for a, b in itertools.pairwise(ends)]
    assert parts == [PROMPT + STEPS[0] + "\n", STEPS[1] + "\n", STEPS[2] + "\n"]


def test_the_score_of_a_step_does_not_see_what_follows(byte_tokenizer):
    model = make(byte_tokenizer)
    whole = model.score_steps(PROMPT, STEPS)
    torch.testing.assert_close(model.score_steps(PROMPT, STEPS[:2]), whole[:2], rtol=1e-5, atol=1e-6)


def test_training_tells_right_steps_from_wrong_ones(byte_tokenizer):
    scores = train(make(byte_tokenizer)).score_steps(PROMPT, STEPS)
    assert scores[:2].min() > 0.6 > 0.4 > scores[2]


def test_solutions_that_share_steps_are_scored_as_one_by_one(byte_tokenizer):
    model = make(byte_tokenizer)
    prompts = [PROMPT, PROMPT, "where is ball ?"]
    solutions = [STEPS, [*STEPS[:2], "wrong"], ["shed"]]
    expected = torch.stack([model.score_steps(p, s).min() for p, s in zip(prompts, solutions, strict=True)])
    for budget in (None, 20):
        torch.testing.assert_close(model.score(prompts, solutions, max_tokens=budget), expected)


def test_aggregates():
    logits = torch.tensor([0.0, 2.0, -1.0])
    # sigmoid: 0.5, 0.880797, 0.268941; their product 0.118441; sigmoid of the mean 1/3: 0.582570
    for name, expected in {"min": 0.268941, "mean": 0.582570, "last": 0.268941, "product": 0.118441}.items():
        how: Any = name
        assert aggregate_step_scores(logits, how).item() == pytest.approx(expected, abs=1e-6)
    assert aggregate_step_scores(logits.flip(0), "last").item() == 0.5
    wrong: Any = "max"
    with raises_error("invalid_value", key="aggregate"):
        aggregate_step_scores(logits, wrong)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_model_with_labels_wrong_and_right_becomes_one_score(architecture, byte_tokenizer, tmp_path):
    config = tiny_model(architecture, vocab_size=len(byte_tokenizer), initializer_range=0.3).config
    torch.manual_seed(0)
    two = AutoModelForTokenClassification.from_config(config, dtype=torch.float32).eval()
    two.save_pretrained(tmp_path / "two")
    byte_tokenizer.save_pretrained(tmp_path / "two")
    model = ProcessRewardModel.from_pretrained(tmp_path / "two")
    expected = plain_probabilities(two, model.encode(PROMPT, STEPS)).softmax(-1)[:, 1]
    torch.testing.assert_close(model.score_steps(PROMPT, STEPS), expected, rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path / "one")
    assert AutoModelForTokenClassification.from_pretrained(tmp_path / "one").num_labels == 1


def test_bad_input_is_answered_in_one_sentence(byte_tokenizer):
    model = make(byte_tokenizer)
    with raises_error("no_steps"):
        model.score_steps(PROMPT, [])
    with raises_error("context_too_short"):
        model.score_steps(PROMPT, ["a long step"] * 40)
    with raises_error("invalid_value", key="step_separator"):
        model.step_separator = ""
