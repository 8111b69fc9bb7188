"""Completions with what is wrong with each; likelihood and order by a small model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from raises import raises_error
from rlhf_data import Encoder, TokenSequence, pack
from rlhf_eval.validation import AdversarialValidator, ReferenceScorer, ValidatorConfig
from rlhf_models import token_logps

PROMPTS = ["where is mary ?", "where is the ball ?", "so ,"]
TEXTS = [" in the kitchen . she cooks . it is late .", " mary took it .", ""]


@pytest.fixture
def reference(tiny_llama: Any, byte_tokenizer: Any) -> ReferenceScorer:
    return ReferenceScorer(tiny_llama, byte_tokenizer)


def test_likelihood_is_that_of_each_completion_alone(
    reference: ReferenceScorer, tiny_llama: Any, byte_tokenizer: Any
) -> None:
    found = reference.nll(PROMPTS, TEXTS)
    encoder = Encoder(byte_tokenizer)
    for prompt, text, nll in zip(PROMPTS[:2], TEXTS[:2], found, strict=False):
        (ids,), start = encoder.completions(prompt, [text])
        (batch,) = pack([TokenSequence(ids, start)])
        assert nll == pytest.approx(-token_logps(tiny_llama, batch).logps.mean().item(), abs=1e-5)


def test_order_matters_only_where_there_are_sentences(reference: ReferenceScorer) -> None:
    found = reference.coherence(PROMPTS, TEXTS)
    assert math.isfinite(found[0]) and np.isnan(found[1:]).all()
    assert reference.coherence(PROMPTS[:1], TEXTS[:1])[0] == pytest.approx(found[0], abs=1e-5)


def test_what_is_not_known_is_null() -> None:
    (found,) = AdversarialValidator().validate(["q"], [TEXTS[0]])
    assert {name for name, value in found.measures.items() if value is None} == {
        *("nll", "coherence", "entailment", "contradiction")
    }
    assert (found.score, found.flaws) == (1.0, ())


def test_flaws_are_what_is_beyond_thresholds() -> None:
    (empty, again) = AdversarialValidator().validate(["q", "q"], ["  ", "so it goes " * 8])
    assert [each.kind for each in empty.flaws] == ["empty"] and empty.score == 0.0
    assert [each.kind for each in again.flaws] == ["repetition"] and again.score == 0.0


def test_thresholds_come_from_good_completions(reference: ReferenceScorer) -> None:
    texts = [f" mary went to room {i} . she sat . it rained {i} times ." for i in range(40)]
    validator = AdversarialValidator(reference).calibrated(["where is mary ?"] * 40, texts)
    nll = reference.nll(["where is mary ?"] * 40, texts)
    assert validator.config.nll == (pytest.approx(nll.mean()), pytest.approx(nll.std(ddof=1)))
    flagged = [bool(each.flaws) for each in validator.validate(["where is mary ?"] * 40, texts)]
    assert sum(flagged) <= 4  # a twentieth is below the quantile, and few are 2 deviations away
    with raises_error("too_few_rows", rows=3):
        AdversarialValidator(reference).calibrated(PROMPTS * 1, [" a b"] * 3)


def test_both_ends_of_likelihood_are_flaws(reference: ReferenceScorer) -> None:
    nll = float(reference.nll(PROMPTS[:1], TEXTS[:1])[0])
    for mean, kind in ((nll - 3.5, "surprising"), (nll + 2.5, "bland"), (nll, None)):
        validator = AdversarialValidator(reference, config=ValidatorConfig(nll=(mean, 1.0)))
        (found,) = validator.validate(PROMPTS[:1], TEXTS[:1])
        assert [each.kind for each in found.flaws] == ([kind] if kind else [])
    # Severity is a half at the limit: 1 - 3 / 3.5 / 2.
    config = ValidatorConfig(nll=(nll - 3.5, 1.0))
    (found,) = AdversarialValidator(reference, config=config).validate(PROMPTS[:1], TEXTS[:1])
    assert found.score == pytest.approx(3 / 3.5 / 2)
