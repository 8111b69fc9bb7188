"""Examples of every method, and what their trainers are compared with: plain padded forward passes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from rlhf_algos.tracking.run_facts import MACHINE_KEYS
from rlhf_data import KTOExample, PreferencePair, StepExample, StepPair, TokenSequence

VOCABULARY = 40


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read from or left in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _completions(rng: random.Random, prompt: list[int], count: int) -> list[TokenSequence]:
    made = []
    for first in rng.sample(range(3, VOCABULARY), count):
        rest = [rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(0, 5))]
        made.append(TokenSequence([*prompt, first, *rest], len(prompt)))
    return made


def _prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(2, 6))]


def make_pairs(count: int = 8, seed: int = 0) -> list[PreferencePair]:
    """Preference pairs with ragged prompts and completions."""
    rng = random.Random(seed)
    pairs = [_completions(rng, _prompt(rng), 2) for _ in range(count)]
    return [PreferencePair(chosen, rejected) for chosen, rejected in pairs]


def make_sequences(count: int = 8, seed: int = 0) -> list[TokenSequence]:
    """Ragged prompts with completions."""
    return [pair.chosen for pair in make_pairs(count, seed)]


def make_labelled(count: int = 8, seed: int = 0) -> list[KTOExample]:
    """Completions labelled good and bad, each with the next row's completion after its own prompt."""
    sequences = make_sequences(count, seed)
    examples = []
    for i, (sequence, other) in enumerate(zip(sequences, sequences[1:] + sequences[:1], strict=True)):
        prompt = list(sequence.input_ids[: sequence.score_from])
        kl = TokenSequence(prompt + list(other.input_ids[other.score_from :]), len(prompt))
        examples.append(KTOExample(sequence, i % 3 != 1, kl))
    return examples


def make_steps(count: int = 8, seed: int = 0) -> list[StepExample | StepPair]:
    """Solutions of one to three steps: labelled ones, and pairs of which the second has labels too."""
    rng = random.Random(seed)
    examples: list[StepExample | StepPair] = []
    for i in range(count):
        prompt, solutions = _prompt(rng), []
        for labelled in (i % 3 != 2, True):
            ids, ends = list(prompt), []
            for _ in range(rng.randrange(1, 4)):
                ids += [rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, 4))]
                ends.append(len(ids) - 1)
            labels = tuple(float(rng.random() < 0.5) for _ in ends) if labelled else ()
            solutions.append(StepExample(TokenSequence(ids, len(ids)), tuple(ends), labels))
        examples.append(StepPair(*solutions) if i % 3 == 2 else solutions[0])
    return examples


@pytest.fixture
def padded_logits() -> Callable[[Any, Sequence[TokenSequence]], torch.Tensor]:
    """(B, T, V) logits of sequences from one plain padded forward pass of a model."""

    def compute(model: Any, sequences: Sequence[TokenSequence]) -> torch.Tensor:
        longest = max(len(sequence.input_ids) for sequence in sequences)
        ids = torch.zeros(len(sequences), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence.input_ids)] = torch.tensor(list(sequence.input_ids))
            mask[row, : len(sequence.input_ids)] = 1
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits

    return compute


@pytest.fixture
def padded_logps(
    padded_logits: Callable[[Any, Sequence[TokenSequence]], torch.Tensor],
) -> Callable[[Any, Sequence[TokenSequence]], torch.Tensor]:
    """(B,) summed log-probs of the scored tokens of sequences, from one plain padded forward pass."""

    def compute(model: Any, sequences: Sequence[TokenSequence]) -> torch.Tensor:
        distribution = padded_logits(model, sequences).log_softmax(-1)
        return torch.stack(
            [
                sum((distribution[row, t - 1, s.input_ids[t]] for t in s.scored()), torch.zeros(()))
                for row, s in enumerate(sequences)
            ]
        )

    return compute


@pytest.fixture
def history() -> Callable[[Any], list[dict[str, float]]]:
    """Trains and gives the metrics of every step, wall-clock time left out."""

    def run(trainer: Any) -> list[dict[str, float]]:
        rows: list[dict[str, float]] = []
        trainer.on_step = lambda step, metrics: rows.append(
            {name: value for name, value in metrics.items() if name not in MACHINE_KEYS}
        )
        trainer.train()
        return rows

    return run


EXAMPLES: dict[str, Callable[[int, int], list[Any]]] = {
    "sequences": make_sequences,
    "pairs": make_pairs,
    "labelled": make_labelled,
    "steps": make_steps,
}


@pytest.fixture
def examples() -> Callable[..., list[Any]]:
    """Examples of a kind: sequences, pairs, labelled or steps; `count` and `seed` may be given."""

    def make(kind: str, count: int = 8, seed: int = 0) -> list[Any]:
        return EXAMPLES[kind](count, seed)

    return make
