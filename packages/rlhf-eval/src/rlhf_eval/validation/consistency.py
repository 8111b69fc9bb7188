"""Whether texts say what their sources say: each of their sentences against each sentence of the source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from rlhf_data import UserError
from rlhf_eval.validation.flaws import sentences

Infers = Callable[[Sequence[str], Sequence[str]], np.ndarray]
"""(B, 2) P(entailment) and P(contradiction) of hypotheses by their premises: a model, or a world's rules."""


@dataclass(frozen=True)
class Claim:
    """A sentence of a completion, measured against its source.

    Args:
        text: the sentence.
        span: where it begins and ends in the completion, in characters.
        entailment: P(entailment) by the sentence of the source that entails it most.
        contradiction: P(contradiction) by the sentence of the source that contradicts it most.
        against: that sentence.
    """

    text: str
    span: tuple[int, int]
    entailment: float
    contradiction: float
    against: str


class NLIModel:
    """P(entailment) and P(contradiction) by a sequence classifier of natural language inference.

    Args:
        model: a transformers sequence classifier.
        tokenizer: its tokenizer, which joins premise and hypothesis.
        places: which of its outputs are entailment, neutral and contradiction.
        max_tokens: budget in tokens for one forward pass, padding included.

    Attributes:
        cut: how many pairs so far did not fit the model's context, and lost the end of the longer text.
    """

    def __init__(
        self, model: Any, tokenizer: Any, places: Sequence[int], *, max_tokens: int = 16_384
    ) -> None:
        self.model, self.tokenizer, self.max_tokens = model.eval(), tokenizer, max_tokens
        self.places, self.cut = list(places), 0

    @classmethod
    def from_pretrained(cls, name: str, *, dtype: str = "auto", device: Any = None) -> Self:
        """Load a model; its config's `id2label` names entailment, neutral and contradiction.

        Raises:
            UserError: it does not, or the model cannot be loaded.
        """
        from rlhf_models import label_places, load_text_classifier

        places = label_places(name, ("entailment", "neutral", "contradiction"))
        return cls(*load_text_classifier(name, dtype=dtype, device=device), places)

    def __call__(self, premises: Sequence[str], hypotheses: Sequence[str]) -> np.ndarray:
        """(B, 2) P(entailment) and P(contradiction); equal pairs are computed once.

        Of a pair that does not fit the model's context the end of the longer text is left out.

        Raises:
            UserError: the model gives numbers that are not finite.
        """
        import torch

        pairs = list(zip(premises, hypotheses, strict=True))
        each, longest = sorted(set(pairs)), self._longest()
        encoded = [self.tokenizer(*pair, truncation=True, max_length=longest) for pair in each]
        self.cut += sum(len(self.tokenizer(*pair)["input_ids"]) > longest for pair in each)
        found: dict[tuple[str, str], list[float]] = {}
        with torch.inference_mode():
            for places in _by_length([len(one["input_ids"]) for one in encoded], self.max_tokens):
                batch = self.tokenizer.pad([encoded[place] for place in places], return_tensors="pt")
                logits = self.model(**batch.to(self.model.device)).logits[:, self.places].float()
                if not logits.isfinite().all():
                    raise UserError(
                        "the NLI model gives numbers that are not finite, so that it says nothing; check its "
                        "weights, or load it in float32",
                        code="not_finite",
                    )
                for place, values in zip(places, logits.softmax(-1)[:, [0, 2]].tolist(), strict=True):
                    found[each[place]] = values
        return np.array([found[pair] for pair in pairs]).reshape(-1, 2)

    def _longest(self) -> int:
        """Tokens of a pair: what the tokenizer says, or else the model, which may count places never used."""
        from rlhf_models import context_length

        return min(self.tokenizer.model_max_length, context_length(self.model) or 512)


def claims(
    infers: Infers, sources: Sequence[str | None], completions: Sequence[str]
) -> list[list[Claim] | None]:
    """The sentences of completions with how far their sources bear them out; None without a source.

    A sentence's P(entailment) is the largest by any sentence of its source, its P(contradiction) too (SummaC,
    zero-shot: Laban et al. 2021, arXiv:2111.09525, section 3.1).
    """
    split = [
        (sentences(source or ""), list(_spans(text)))
        for source, text in zip(sources, completions, strict=True)
    ]
    pairs = [
        (premise, text[start:end])
        for (premises, spans), text in zip(split, completions, strict=True)
        for start, end in spans
        for premise in premises
    ]
    rows = iter(infers([premise for premise, _ in pairs], [claim for _, claim in pairs]) if pairs else ())
    found: list[list[Claim] | None] = []
    for (premises, spans), text in zip(split, completions, strict=True):
        own = []
        for start, end in spans if premises else ():
            entailment, contradiction = np.array([next(rows) for _ in premises]).T
            worst = int(contradiction.argmax())
            probabilities = float(entailment.max()), float(contradiction[worst])
            own.append(Claim(text[start:end], (start, end), *probabilities, premises[worst]))
        found.append(own if premises else None)
    return found


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Where the sentences of a text begin and end."""
    end = 0
    for sentence in sentences(text):
        start = text.index(sentence, end)
        end = start + len(sentence)
        yield start, end


def _by_length(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Batches of places, the shortest first, of which the padded size is within the budget."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[place] > budget:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch
