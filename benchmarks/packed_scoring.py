"""Packed against padded scoring: the same log-probs and gradients, the same loss, two ways.

Packed: `rlhf_data.pack` and `rlhf_models.token_logps`. Padded: one row per sequence, padded on the right,
through the plain transformers model (sdpa attention), its LM head on all positions from the earliest
completion on. Prints medians and ratios (padded / packed) as JSON.
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
    QARecord,
    StoryWorldConfig,
    TokenSequence,
    UserError,
    atomic_write_json,
    generate_stories,
    pack,
    read_rows,
)
from rlhf_data.worlds.story import split_sentences
from rlhf_models import build_tiny_llama, token_logps, train_byte_tokenizer

HH_DATA = Path(__file__).parents[2] / "shared/data/hh-rlhf/harmless-base-1500.jsonl.gz"
MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
Batch = list[TokenSequence]
Pair = tuple[str, str, str]
"""Prompt, chosen and rejected completion."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of the work."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    batches: int
    pairs: int
    prompts: int
    group_size: int
    max_completion_tokens: int
    stories: int


FULL = Sizes(
    vocab_size=8192,
    hidden_size=256,
    num_layers=8,
    batches=3,
    pairs=8,
    prompts=4,
    group_size=8,
    max_completion_tokens=128,
    stories=8,
)
QUICK = Sizes(
    vocab_size=300,
    hidden_size=32,
    num_layers=2,
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
    """Vocabulary size, and batches by workload, from preference pairs (synthetic ones without `data`)."""
    rng = random.Random(0)
    stories = generate_stories(StoryWorldConfig(), sizes.batches * sizes.stories, split="train", seed=0)
    texts = [story.story for story in stories]
    pairs = list(_transcripts(data) if data else _synthetic_pairs(texts, rng))
    tokenizer = train_byte_tokenizer([*texts, *(text for pair in pairs for text in pair)], sizes.vocab_size)

    def scored(prompt: str, completion: str, limit: int | None = None) -> TokenSequence:
        start, rest = tokenizer(prompt)["input_ids"], tokenizer(completion)["input_ids"][:limit]
        return TokenSequence(start + rest, len(start))

    def batches(items: list[Any], size: int, make: Callable[[Any], Iterator[TokenSequence]]) -> list[Batch]:
        chunks = [items[n * size : (n + 1) * size] for n in range(sizes.batches)]
        return [[sequence for item in chunk for sequence in make(item)] for chunk in chunks]

    def samples(pair: Pair) -> Iterator[TokenSequence]:
        """Completions of other prompts stand for the group's samples: they have real texts' lengths."""
        for _, completion, _ in rng.sample(pairs, sizes.group_size):
            yield scored(pair[0], completion, sizes.max_completion_tokens)

    return len(tokenizer), {
        "hh_pairs": batches(pairs, sizes.pairs, lambda pair: (scored(pair[0], text) for text in pair[1:])),
        "group_samples": batches(pairs, sizes.prompts, samples),
        "minmax_trees": batches(
            stories, sizes.stories, lambda story: (scored(*texts) for texts in _minmax_texts(story, rng))
        ),
    }


def _transcripts(path: Path) -> Iterator[Pair]:
    """Prompt, chosen and rejected completion of HH-RLHF transcripts, split at the last assistant turn."""
    for _, row in read_rows(path):
        split = {key: row[key].rpartition("\n\nAssistant:") for key in ("chosen", "rejected")}
        prompts = {"".join(parts[:2]) for parts in split.values()}
        completions = [parts[2] for parts in split.values()]
        if len(prompts) == 1 and all(completions):
            yield prompts.pop(), completions[0], completions[1]


def _synthetic_pairs(texts: list[str], rng: random.Random) -> Iterator[Pair]:
    for _ in range(16):
        prompt, chosen, rejected = (" ".join(rng.choices(texts, k=k)) for k in (3, 1, 2))
        yield f"\n\nHuman: {prompt}\n\nAssistant:", f" {chosen}", f" {rejected}"


def _minmax_texts(story: QARecord, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Prompts and completions of one story: an answer for each of 4 choices, 4 critiques of each answer."""
    policy = f"{story.story}\n{story.question}\nanswer:"
    critiques = [f" {s} so {verdict}" for s in split_sentences(story.story) for verdict in ("right", "wrong")]
    for choice in story.choices:
        answer = f" it is {choice} ."
        yield policy, answer
        for critique in rng.sample(critiques, 4):
            yield f"{policy}{answer}\ncritique:", critique


def agreement(vocab_size: int, sizes: Sizes, batches: list[Batch]) -> dict[str, Any]:
    """Tokens computed by each way, and how far log-probs and gradients of all batches are apart.

    Gradients: largest difference in a parameter, relative to the parameter's largest gradient; the worst
    parameter.
    """
    logps: dict[str, list[torch.Tensor]] = {kind: [] for kind in STEPS}
    tokens = dict.fromkeys(STEPS, 0)
    gradients = {}
    for kind, step in STEPS.items():
        model = _model(vocab_size, sizes)
        for batch in batches:
            done = step(model, batch)
            done.loss.backward()
            logps[kind].append(done.logps.detach())
            tokens[kind] += done.tokens
        gradients[kind] = [parameter.grad for parameter in model.parameters()]
    ours, theirs = torch.cat(logps["packed"]), torch.cat(logps["padded"])
    grads = zip(gradients["packed"], gradients["padded"], strict=True)
    return {
        "tokens": tokens | {"ratio": tokens["padded"] / tokens["packed"]},
        "scored_tokens": len(ours),
        "agreement": {
            "logps_max_abs_difference": float((ours - theirs).abs().max()),
            "gradients_max_rel_difference": max(
                float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) for a, b in grads
            ),
        },
    }


def timing(vocab_size: int, sizes: Sizes, batches: list[Batch], repeats: int) -> dict[str, float]:
    """Median seconds of all batches, forward and backward, the two ways in turn."""
    models = {kind: _model(vocab_size, sizes) for kind in STEPS}
    seconds: dict[str, list[float]] = {kind: [0.0] * repeats for kind in STEPS}
    for repeat in range(repeats):
        for n, batch in enumerate(batches):
            for kind in sorted(STEPS, reverse=(repeat + n) % 2 == 1):
                models[kind].zero_grad()
                start = time.perf_counter()
                STEPS[kind](models[kind], batch).loss.backward()
                seconds[kind][repeat] += time.perf_counter() - start
    ratios = [b / a for a, b in zip(seconds["packed"], seconds["padded"], strict=True)]
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    return medians | {"ratio": statistics.median(ratios)}


def peak_memory(kind: str, vocab_size: int, sizes: Sizes, batches: list[Batch], threads: int) -> float:
    """MB that the batches' forward and backward passes add to this process's peak; needs a fresh process."""
    torch.set_num_threads(threads)
    model = _model(vocab_size, sizes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for batch in batches:
        model.zero_grad()
        STEPS[kind](model, batch).loss.backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * MAXRSS_BYTES / 1e6


def _in_child(function: Callable[..., float], *arguments: Any) -> float:
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(function, *arguments).result()


def _model(vocab_size: int, sizes: Sizes) -> Any:
    """The same random Llama each time."""
    return build_tiny_llama(
        vocab_size,
        seed=0,
        hidden_size=sizes.hidden_size,
        num_layers=sizes.num_layers,
        intermediate_size=3 * sizes.hidden_size,
        max_positions=2048,
    )


def run(sizes: Sizes, data: Path | None, *, repeats: int, threads: int) -> dict[str, Any]:
    """All workloads; see benchmarks/README.md for the result's keys."""
    vocab_size, work = make_work(sizes, data)
    # All forks come before the first forward pass: a process whose autograd has run cannot fork and go on.
    memory = {
        name: {kind: _in_child(peak_memory, kind, vocab_size, sizes, batches, threads) for kind in STEPS}
        for name, batches in work.items()
    }
    torch.set_num_threads(threads)
    results = {
        name: {
            "sequences": sum(len(batch) for batch in batches),
            **agreement(vocab_size, sizes, batches),
            "seconds": timing(vocab_size, sizes, batches, repeats),
            "peak_memory_mb": memory[name] | {"ratio": memory[name]["padded"] / memory[name]["packed"]},
        }
        for name, batches in work.items()
    }
    return {
        "benchmark": "packed_scoring",
        "data": "hh-rlhf" if data else "synthetic",
        "model_parameters": _model(vocab_size, sizes).num_parameters(),
        "repeats": repeats,
        "threads": threads,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "workloads": results,
    }


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed passes over the batches (default 5)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--data", type=Path, default=HH_DATA, help="HH-RLHF file (default %(default)s)")
    parser.add_argument("--output", type=Path, help="write the JSON to this file too")
    parser.add_argument("--quick", action="store_true", help="a tiny model on synthetic texts, for tests")
    options = parser.parse_args(arguments)
    try:
        result = run(
            QUICK if options.quick else FULL,
            None if options.quick else options.data,
            repeats=options.repeats,
            threads=options.threads,
        )
        if options.output:
            atomic_write_json(options.output, result)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
