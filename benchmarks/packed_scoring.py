"""Packed against padded scoring: the same log-probs and gradients, the same loss, two ways.

Packed: `rlhf_data.pack` and `rlhf_models.token_logps`. Padded: one row per sequence, padded on the right, through
the plain transformers model (sdpa attention), its LM head on all positions from the earliest completion on.
Prints medians and ratios (padded / packed) as JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from rlhf_data import (
    StoryWorldConfig,
    TokenSequence,
    UserError,
    atomic_write_json,
    generate_stories,
    pack,
    read_rows,
)
from rlhf_models import build_tiny_llama, token_logps, train_byte_tokenizer

HH_DATA = Path(__file__).parents[2] / "shared/data/hh-rlhf/harmless-base-1500.jsonl.gz"
MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
Batch = list[TokenSequence]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of the work."""

    vocab_size: int
    model: dict[str, int]
    batches: int
    pairs: int
    prompts: int
    group_size: int
    max_completion_tokens: int
    stories: int


FULL = Sizes(
    vocab_size=8192,
    model={"hidden_size": 256, "num_layers": 8, "num_heads": 4, "intermediate_size": 768, "max_positions": 2048},
    batches=3,
    pairs=8,
    prompts=4,
    group_size=8,
    max_completion_tokens=128,
    stories=8,
)
QUICK = Sizes(
    vocab_size=300,
    model={"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64, "max_positions": 1024},
    batches=1,
    pairs=4,
    prompts=2,
    group_size=8,
    max_completion_tokens=16,
    stories=2,
)


@dataclass(frozen=True)
class Step:
    """One forward pass: log-probs of the scored tokens in order, a loss of them, tokens computed."""

    logps: torch.Tensor
    loss: torch.Tensor
    tokens: int


def packed_step(model: Any, sequences: Batch) -> Step:
    """Score on one packed tree."""
    (batch,) = pack(sequences)
    logps = token_logps(model, batch).logps
    return Step(logps, _loss(logps, batch.score_sequence, len(sequences)), batch.num_tokens)


def padded_step(model: Any, sequences: Batch) -> Step:
    """Score one padded row per sequence, as DPO and GRPO trainers do."""
    width = max(len(s.input_ids) for s in sequences)
    first = min(s.score_from for s in sequences)
    ids = torch.tensor([[*s.input_ids, *[0] * (width - len(s.input_ids))] for s in sequences])
    at = torch.arange(width)
    lengths = torch.tensor([len(s.input_ids) for s in sequences])[:, None]
    starts = torch.tensor([s.score_from for s in sequences])[:, None]
    output = model(
        input_ids=ids,
        attention_mask=(at < lengths).long(),
        logits_to_keep=width - first + 1,
        use_cache=False,
    )
    rows = output.logits[:, :-1].log_softmax(-1).gather(-1, ids[:, first:, None])[..., 0]
    scored = ((at >= starts) & (at < lengths))[:, first:]
    logps = rows[scored]
    return Step(logps, _loss(logps, scored.nonzero()[:, 0], len(sequences)), ids.numel())


def _loss(logps: torch.Tensor, sequence: torch.Tensor, count: int) -> torch.Tensor:
    """Raises the even sequences and lowers the odd ones, as a preference or an advantage of ±1 does."""
    return (logps * (2.0 * (sequence % 2) - 1.0)).sum() / count


STEPS: dict[str, Callable[[Any, Batch], Step]] = {"packed": packed_step, "padded": padded_step}


def make_work(sizes: Sizes, data: Path | None) -> tuple[int, dict[str, list[Batch]]]:
    """Vocabulary size and the batches of each workload, from preference pairs (synthetic ones without `data`)."""
    rng = random.Random(0)
    stories = generate_stories(StoryWorldConfig(), 64, split="train", seed=0)
    pairs = list(_transcripts(data) if data else _synthetic_pairs([s.story for s in stories], rng))
    tokenizer = train_byte_tokenizer(
        [text for pair in pairs for text in pair] + [s.story for s in stories], sizes.vocab_size
    )

    def ids(text: str) -> list[int]:
        return tokenizer(text)["input_ids"]

    work: dict[str, list[Batch]] = {"hh_pairs": [], "group_samples": [], "minmax_trees": []}
    for n in range(sizes.batches):
        chunk = pairs[n * sizes.pairs : (n + 1) * sizes.pairs]
        work["hh_pairs"].append([_scored(ids(p), ids(c)) for p, *both in chunk for c in both])
        groups = [
            _scored(ids(prompt), ids(completion)[: sizes.max_completion_tokens])
            for prompt, *_ in chunk[: sizes.prompts]
            for _, completion, _ in rng.sample(pairs, sizes.group_size)
        ]
        work["group_samples"].append(groups)
        trees = [
            _scored(ids(prompt), ids(completion))
            for record in stories[n * sizes.stories : (n + 1) * sizes.stories]
            for prompt, completion in _minmax_texts(record, rng)
        ]
        work["minmax_trees"].append(trees)
    return len(tokenizer), work


def _scored(prompt: list[int], completion: list[int]) -> TokenSequence:
    return TokenSequence(prompt + completion, len(prompt))


def _transcripts(path: Path) -> Iterator[tuple[str, str, str]]:
    """Prompt, chosen and rejected completion of HH-RLHF transcripts with both completions."""
    for _, row in read_rows(path):
        split = {key: row[key].rpartition("\n\nAssistant:") for key in ("chosen", "rejected")}
        prompts = {"".join(parts[:2]) for parts in split.values()}
        completions = [parts[2] for parts in split.values()]
        if len(prompts) == 1 and all(completions):
            yield prompts.pop(), completions[0], completions[1]


def _synthetic_pairs(texts: list[str], rng: random.Random) -> Iterator[tuple[str, str, str]]:
    for text in texts:
        prompt = "\n\nHuman: " + " ".join(rng.sample(texts, 2)) + "\n\nAssistant:"
        yield prompt, f" {text}", f" {rng.choice(texts)} no ."


def _minmax_texts(record: Any, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Prompts and completions of one story: an answer for each of 4 choices, 4 critiques of each answer."""
    policy = f"{record.story}\n{record.question}\nanswer:"
    critiques = [f" {s} . so {v}" for s in record.story.split(" . ")[:-1] for v in ("right", "wrong")]
    for choice in record.choices:
        answer = f" it is {choice} ."
        yield policy, answer
        for critique in rng.sample(critiques, 4):
            yield f"{policy}{answer}\ncritique:", critique
