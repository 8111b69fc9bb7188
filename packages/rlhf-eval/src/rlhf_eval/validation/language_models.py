"""Likelihood and coherence of completions under a reference language model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf_data import Encoder, Text, TokenSequence, as_completion
from rlhf_eval.validation.flaws import sentences

_SHUFFLES = 4


class ReferenceScorer:
    """Measures completions by a language model that nothing here trains.

    It must differ from the policy, which gives its own completions a high likelihood.

    Args:
        model: a transformers causal LM.
        tokenizer: its tokenizer.
        max_tokens: budget in tokens for one forward pass.
        seed: of the shuffled sentences.
    """

    def __init__(self, model: Any, tokenizer: Any, *, max_tokens: int = 16_384, seed: int = 0) -> None:
        self.model, self.max_tokens, self.seed = model.eval(), max_tokens, seed
        self.encoder = Encoder(tokenizer)

    def nll(self, prompts: Sequence[Text], completions: Sequence[str]) -> np.ndarray:
        """(B,) mean negative log-likelihood of a completion's tokens and its end, in nats.

        Prompts that completions share are computed once. What does not fit the model's context is left out;
        NaN where nothing does.
        """
        from rlhf_eval.evaluation.divergence import sequence_logps
        from rlhf_models import context_length

        longest = context_length(self.model)
        sequences = []
        for prompt, text in zip(prompts, completions, strict=True):
            (ids,), start = self.encoder.completions(prompt, [as_completion(prompt, text)])
            ids = ids[:longest]
            sequences.append(TokenSequence(ids or [0], min(start, len(ids))))
        sums = sequence_logps(self.model, sequences, max_tokens=self.max_tokens).numpy()
        lengths = np.array([len(each.scored()) for each in sequences], dtype=float)
        return np.where(lengths > 0, -sums / np.maximum(lengths, 1), np.nan)

    def coherence(self, prompts: Sequence[Text], completions: Sequence[str]) -> np.ndarray:
        """(B,) nats per token by which a completion is likelier than with its sentences in another order.

        NaN for fewer than three sentences. The mean over four random orders, the same for a text at any time.
        """
        rows: list[tuple[int, Text, str]] = []
        for place, (prompt, text) in enumerate(zip(prompts, completions, strict=True)):
            parts = sentences(text)
            if len(parts) >= 3:
                rng = random.Random(f"{self.seed} {text}")
                rows.append((place, prompt, " ".join(parts)))
                rows += [(place, prompt, " ".join(_shuffled(parts, rng))) for _ in range(_SHUFFLES)]
        found = np.full(len(prompts), np.nan)
        if rows:
            nll = self.nll([prompt for _, prompt, _ in rows], [text for _, _, text in rows])
            nll = nll.reshape(-1, _SHUFFLES + 1)
            found[[place for place, _, _ in rows[:: _SHUFFLES + 1]]] = nll[:, 1:].mean(1) - nll[:, 0]
        return found


def _shuffled(parts: Sequence[str], rng: random.Random) -> list[str]:
    """Another order of the parts, unless all are alike."""
    found = list(parts)
    for _ in range(8):
        rng.shuffle(found)
        if found != list(parts):
            break
    return found
