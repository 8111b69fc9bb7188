"""Sentences of completions against their sources, by rules and by a small encoder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from raises import raises_error
from rlhf_eval.validation import AdversarialValidator, NLIModel, ValidatorConfig
from rlhf_eval.validation.consistency import claims

SOURCE = "Mary is here. Tom left."


def infers(premises: Sequence[str], hypotheses: Sequence[str]) -> np.ndarray:
    """.9 for the same sentence, .8 for "not" added to it, .1 for any other."""
    return np.array(
        [
            (0.9 if said == premise else 0.1, 0.8 if said.replace(" not", "") == premise != said else 0.1)
            for premise, said in zip(premises, hypotheses, strict=True)
        ]
    )


def test_claims_take_the_largest_over_the_source() -> None:
    text = " Tom left. “Mary is not here.” "
    (found, none, blank, empty) = claims(infers, [SOURCE, None, " ", SOURCE], [text, text, text, ""])
    assert none is None and blank is None and empty == []
    assert found is not None and [text[slice(*each.span)] for each in found] == [each.text for each in found]
    assert [each.entailment for each in found] == [0.9, 0.1]


def test_golden_measures_and_the_flaw() -> None:
    # Entailment (.9 + .1) / 2 = .5; contradiction max(.1, .8); the score is 1 - .8.
    text = "Tom left. Mary is not here."
    validator = AdversarialValidator(infers=infers)
    found, unknown = validator.validate(["q", "q"], [text, text], [SOURCE, None])
    assert found.measures["entailment"] == pytest.approx(0.5) and found.measures["contradiction"] == 0.8
    (flaw,) = found.flaws
    assert (flaw.kind, flaw.severity, flaw.evidence) == ("contradiction", 0.8, "Mary is here.")
    assert flaw.span is not None and text[slice(*flaw.span)] == "Mary is not here."
    assert found.score == pytest.approx(0.2) and found.to_dict()["flaws"][0]["span"] == [10, 27]
    assert unknown.measures["contradiction"] is None and unknown.flaws == ()
    lenient = AdversarialValidator(infers=infers, config=ValidatorConfig(contradiction=0.85))
    assert lenient.validate(["q"], [text], [SOURCE])[0].flaws == ()


def test_what_the_source_says_too_is_no_flaw() -> None:
    both = "Mary is here. Mary is not here."
    (found,) = AdversarialValidator(infers=infers).validate(["q"], ["Mary is not here."], [both])
    assert found.measures["contradiction"] == 0.8 and found.flaws == ()


@pytest.fixture
def nli_folder(tmp_path: Path, byte_tokenizer: Any) -> Path:
    """An encoder with random weights, whose labels stand in another order."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(byte_tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=40,
        initializer_range=0.5,
        id2label={0: "CONTRADICTION", 1: "Neutral", 2: "entailment"},
        label2id={"CONTRADICTION": 0, "Neutral": 1, "entailment": 2},
    )
    for each in (BertForSequenceClassification(config), byte_tokenizer):
        each.save_pretrained(tmp_path / "nli")
    return tmp_path / "nli"


def test_a_model_gives_the_same_in_any_batch(nli_folder: Path) -> None:
    nli = NLIModel.from_pretrained(str(nli_folder))
    premises = ["mary is here .", "a", "mary is here .", "long " * 60, "so"]
    hypotheses = ["no .", "b c d e", "no .", "short", "日本 ."]
    found = nli(premises, hypotheses)
    assert found.shape == (5, 2) and (found[0] == found[2]).all() and ((found >= 0) & (found <= 1)).all()
    ids = nli.tokenizer("mary is here .", "no .", return_tensors="pt")
    expected = nli.model(**ids).logits.softmax(-1)[0]
    np.testing.assert_allclose(found[0], expected[[2, 0]].tolist(), atol=1e-6)
    nli.max_tokens = 1
    np.testing.assert_allclose(nli(premises, hypotheses), found, atol=1e-6)
    assert nli.cut == 2  # one pair, in two calls
    assert nli([], []).shape == (0, 2)


def test_a_broken_model_says_nothing(nli_folder: Path) -> None:
    nli = NLIModel.from_pretrained(str(nli_folder))
    with torch.no_grad():
        nli.model.classifier.bias[0] = float("nan")
    with raises_error("not_finite"):
        nli(["a"], ["b"])


def test_a_decoder_finds_the_end_of_each_text_in_a_batch(tmp_path: Path, byte_tokenizer: Any) -> None:
    config = LlamaConfig(
        vocab_size=len(byte_tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=None,
        id2label={0: "entailment", 1: "neutral", 2: "contradiction"},
    )
    torch.manual_seed(0)
    for each in (LlamaForSequenceClassification(config), byte_tokenizer):
        each.save_pretrained(tmp_path / "nli")
    nli = NLIModel.from_pretrained(str(tmp_path / "nli"))
    together = nli(["a", "long text here"], ["b", "and more of it"])
    alone = nli(["a"], ["b"])
    np.testing.assert_allclose(together[0], alone[0], atol=1e-6)


def test_a_model_without_the_labels_is_refused(built_llama_folder: Path) -> None:
    with raises_error("wrong_model_kind"):
        NLIModel.from_pretrained(str(built_llama_folder))
