"""What tokens are worth, against a plain pass over each text."""

import math

import numpy as np
import pytest
import torch

from rlhf_models.compression.scores import contrasts, question_likelihoods, surprisals
from rlhf_models.loading.tiny import tiny_model

MODEL = tiny_model("llama", vocab_size=60, seed=1)


@torch.no_grad()
def plain(beginning, ending):
    """log p(ending | beginning) by a forward pass over both."""
    ids = torch.tensor([[*beginning, *ending]])
    logps = MODEL(ids).logits[0].log_softmax(-1)
    at = range(len(beginning), ids.shape[1])
    return np.array([float(logps[i - 1, ids[0, i]]) for i in at])


@pytest.mark.parametrize("batch_tokens", [None, 4])
def test_surprisals_are_those_of_plain_passes(batch_tokens):
    texts = [[5, 9, 14, 3], [5, 9, 8], [7]]
    found = surprisals(MODEL, texts, start=1, window=128, batch_tokens=batch_tokens)
    for text, values in zip(texts, found, strict=True):
        np.testing.assert_allclose(values, -plain([1], text), atol=1e-5)


def test_without_start_token_the_first_token_is_unknown():
    (found,) = surprisals(MODEL, [[5, 9]], start=None, window=128, batch_tokens=None)
    np.testing.assert_allclose(found, [math.log(60), -plain([5], [9])[0]], atol=1e-5)


def test_long_texts_are_read_in_windows():
    (found,) = surprisals(MODEL, [[5, 9, 14, 3, 8]], start=1, window=4, batch_tokens=None)
    np.testing.assert_allclose(found[:3], -plain([1], [5, 9, 14]), atol=1e-5)
    np.testing.assert_allclose(found[3:], -plain([1], [3, 8]), atol=1e-5)


def test_questions_are_scored_after_their_pieces():
    pieces, questions = [[5, 9], [5, 8, 2], [5, 9]], [[30, 31], [30, 31], [40]]
    found = question_likelihoods(MODEL, pieces, questions, start=1, batch_tokens=None)
    expected = [plain([1, *p], q).mean() for p, q in zip(pieces, questions, strict=True)]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_contrasts_are_differences_of_two_passes():
    pieces, questions = [[5, 9], [5, 8, 2]], [[30, 31], [30, 31]]
    for piece, values in zip(
        pieces, contrasts(MODEL, pieces, questions, start=1, batch_tokens=None), strict=True
    ):
        np.testing.assert_allclose(values, plain([1, 30, 31], piece) - plain([1], piece), atol=1e-5)
