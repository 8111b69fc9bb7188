"""What can still be read off compressed texts, against the same texts truncated to as many tokens.

    uv run python benchmarks/compression.py --work work --output benchmarks/results/compression.json

A tiny model is trained on the spot for each seed: on stories of the story world, told in turns, with codes
hidden in them, and on single sentences with the question that they answer. Held-out stories of eight movers
then ask where one of them is ("stories"), or for the one code that was planted somewhere ("needles"); stories
of one mover of 24 to 32 sentences ask where it is ("one_mover"). Texts are compressed by that model, or
truncated, to 1/2, 1/4 and 1/8 of their tokens; a reader that makes no mistake (rules) answers from what is
left, so that accuracy is what selection loses and nothing else. Prints JSON:
accuracy over all seeds and of each, the share of texts whose decisive sentence is left whole, each arm minus
the best truncation on the same questions with a 95% interval, and how long compressing takes relative to the
forward passes in it.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_algos import SFTConfig, SFTTrainer
from rlhf_data import QARecord, StoryWorldConfig, TokenSequence, atomic_write_json, generate_stories, pack
from rlhf_models import (
    ContextCompressor,
    build_tiny_llama,
    load_causal_lm,
    load_tokenizer,
    save_model,
    train_byte_tokenizer,
)
from rlhf_models.compression import scores
from rlhf_models.compression.budget import keep_best, sentence_numbers

PLACES = ("kitchen", "garden", "shed", "attic", "cellar", "hall", "office", "garage")
MOVERS = 8
RATIOS = (2, 4, 8)
TRUNCATIONS = ("first", "last", "middle", "random")
METHODS = ("surprisal", "question", "contrastive")
TASKS = ("stories", "needles", "one_mover")


@dataclass(frozen=True)
class Item:
    """A long text, a question to one sentence of it, and the answer, a place, after its beginning."""

    sentences: list[str]
    decisive: int
    question: str
    said: str
    answer: str


def stories(count: int, split: Any, seed: int, **world: int) -> dict[str, list[QARecord]]:
    """Stories of every mover."""
    found: dict[str, list[QARecord]] = {}
    for record in generate_stories(
        StoryWorldConfig(num_movers=MOVERS, **world), count, split=split, seed=seed
    ):
        found.setdefault(record.extra["mover"], []).append(record)
    return found


def told(records: Sequence[QARecord], rng: random.Random) -> list[str]:
    """Sentences of several stories, each in its order, in turns."""
    queues = [
        [f" {part.strip()} ." for part in record.story.split(".") if part.strip()] for record in records
    ]
    found = []
    while any(queues):
        found.append(rng.choices(queues, weights=[len(queue) for queue in queues])[0].pop(0))
    return found


def story_item(sentences: list[str], record: QARecord) -> Item:
    """Where a mover is: the last sentence that saw it."""
    name = record.extra["mover"]
    decisive = max(i for i, sentence in enumerate(sentences) if sentence.split()[0] == name)
    said = " " + " ".join(sentences[decisive].split()[:3])
    return Item(sentences, decisive, record.question, said, record.answer_text)


def needle_item(sentences: list[str], name: str, rng: random.Random) -> Item:
    """The code of a mover, planted anywhere."""
    at, code = rng.randint(0, len(sentences)), rng.choice(PLACES)
    needle = f" code of {name} is {code} ."
    return Item(
        [*sentences[:at], needle, *sentences[at:]],
        at,
        f"what is code of {name} ?",
        f" code of {name} is",
        code,
    )


def lesson(
    tokenizer: Any, by_mover: dict[str, list[QARecord]], rng: random.Random
) -> tuple[TokenSequence, ...]:
    """A text, and single sentences of it with the question that they answer."""
    chosen = rng.sample(sorted(by_mover), rng.randint(1, MOVERS))
    records = [rng.choice(by_mover[name]) for name in chosen]
    needle = needle_item(told(records, rng), chosen[0], rng)
    start = [tokenizer.bos_token_id]
    found = [TokenSequence([*start, *tokenizer("".join(needle.sentences))["input_ids"]], 1)]
    for item in [needle, *(story_item(needle.sentences, record) for record in records)]:
        alone = [*start, *tokenizer(item.sentences[item.decisive])["input_ids"]]
        found.append(TokenSequence([*alone, *tokenizer(f" {item.question}")["input_ids"]], len(alone)))
    return tuple(found)


def scorer(folder: Path, steps: int, seed: int) -> tuple[Any, Any]:
    """The model that scores, and its tokenizer, trained unless they are in the folder."""
    if not folder.is_dir():
        rng, by_mover = random.Random(seed), stories(4000, "train", seed)
        texts = []
        for name, records in sorted(by_mover.items()):
            needle = needle_item(told(records[:20], rng), name, rng)
            texts.append("".join(needle.sentences) + f" {needle.question} {records[0].question}")
        tokenizer = train_byte_tokenizer(texts, 400)
        model = build_tiny_llama(len(tokenizer), eos_token_id=2, pad_token_id=0, seed=seed)
        config = SFTConfig(
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            adam_beta2=0.95,
            per_device_train_batch_size=16,
            num_train_epochs=1,
            max_tokens_per_batch=None,
            save_steps=None,
            seed=seed,
        )
        lessons = [lesson(tokenizer, by_mover, rng) for _ in range(steps * 16)]
        SFTTrainer(model, config, lessons).train()
        save_model(model.eval(), tokenizer, folder)
    return load_causal_lm(folder), load_tokenizer(folder)


def held_out(task: str, count: int, seed: int) -> list[Item]:
    """Questions to texts of eight movers, or to long ones of one."""
    alone = task == "one_mover"
    world = {"min_sentences": 24, "max_sentences": 32} if alone else {}
    rng, by_mover = random.Random(f"{task}/{seed}"), stories(1000 if alone else 3000, "eval", seed, **world)
    found = []
    for _ in range(count):
        names = rng.sample(sorted(by_mover), 1 if alone else MOVERS)
        records = [rng.choice(by_mover[name]) for name in names]
        sentences = told(records, rng)
        made = (
            story_item(sentences, records[0]) if task != "needles" else needle_item(sentences, names[0], rng)
        )
        found.append(made)
    return found


def truncated(arm: str, ids: list[int], budget: int, tokenizer: Any, rng: np.random.Generator) -> np.ndarray:
    """Positions that a truncation keeps; "middle" cuts the middle out, "random" keeps random sentences."""
    if arm == "random":
        units = sentence_numbers(tokenizer, ids)
        worth = rng.random(units[-1] + 1)[units]
        return keep_best(worth, budget, protected=np.zeros(len(ids), dtype=bool), units=units)
    first = {"first": budget, "last": 0, "middle": budget // 2}[arm]
    return np.r_[:first, len(ids) - budget + first : len(ids)]


def answered(tokenizer: Any, texts: list[list[int]], items: list[Item]) -> np.ndarray:
    """(n,) whether who reads without fault finds the answer: the last sentence about it that has an end."""
    found = []
    for ids, item in zip(texts, items, strict=True):
        said = re.findall(rf"{item.said} ({'|'.join(PLACES)}) \.", tokenizer.decode(ids))
        found.append(bool(said) and said[-1] == item.answer)
    return np.array(found, dtype=float)


class Arms:
    """All arms on the items of one task and seed."""

    def __init__(self, model: Any, tokenizer: Any, items: list[Item], seed: int) -> None:
        self.model, self.tokenizer, self.items = model, tokenizer, items
        self.ids = [tokenizer("".join(item.sentences))["input_ids"] for item in items]
        self.rng = np.random.default_rng(seed)

    def run(self, arm: str, ratio: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Right answers and whole decisive sentences (n,), and the largest error of the number of tokens."""
        budgets = [len(ids) // ratio for ids in self.ids]
        if arm in METHODS:
            made = ContextCompressor(self.model, self.tokenizer, method=arm, ratio=ratio)
            asked = [self.tokenizer(f" {item.question}")["input_ids"] for item in self.items]
            kept = [found.kept for found in made.compress_batch(self.ids, asked)]
        else:
            kept = [
                truncated(arm, ids, budget, self.tokenizer, self.rng)
                for ids, budget in zip(self.ids, budgets, strict=True)
            ]
        texts = [[ids[i] for i in places] for ids, places in zip(self.ids, kept, strict=True)]
        error = max(abs(len(text) - budget) for text, budget in zip(texts, budgets, strict=True))
        return answered(self.tokenizer, texts, self.items), self._whole(kept), error

    def _whole(self, kept: list[np.ndarray]) -> np.ndarray:
        found = []
        for item, ids, places in zip(self.items, self.ids, kept, strict=True):
            numbers = sentence_numbers(self.tokenizer, ids)
            found.append(set(np.flatnonzero(numbers == item.decisive)) <= set(places.tolist()))
        return np.array(found, dtype=float)


def interval(differences: np.ndarray) -> list[float]:
    """Mean difference over questions, and its 95% bootstrap interval."""
    rng = np.random.default_rng(0)
    means = differences[rng.integers(len(differences), size=(2000, len(differences)))].mean(1)
    return [round(float(x), 4) for x in (differences.mean(), *np.quantile(means, [0.025, 0.975]))]


def measured(models: Sequence[tuple[Any, Any]], task: str, options: argparse.Namespace) -> dict[str, Any]:
    """Every arm at every ratio, over all seeds."""
    arms = [
        Arms(*models[seed], held_out(task, options.questions, seed), seed) for seed in range(options.seeds)
    ]
    full = [answered(arm.tokenizer, arm.ids, arm.items) for arm in arms]
    tokens = float(np.mean([len(ids) for arm in arms for ids in arm.ids]))
    result: dict[str, Any] = {"tokens": tokens, "full": float(np.concatenate(full).mean())}
    result["full_of_seeds"] = [float(x.mean()) for x in full]
    for ratio in RATIOS:
        runs = {name: [arm.run(name, ratio) for arm in arms] for name in (*TRUNCATIONS, *METHODS)}
        right = {name: np.concatenate([run[0] for run in each]) for name, each in runs.items()}
        best = max(TRUNCATIONS, key=lambda name: right[name].mean())
        rows: dict[str, Any] = {"best_truncation": best}
        for name, each in runs.items():
            accuracy = float(right[name].mean())
            rows[name] = {
                "accuracy": accuracy,
                "of_full": accuracy / result["full"],
                "accuracy_of_seeds": [float(run[0].mean()) for run in each],
                "decisive_sentence_whole": float(np.concatenate([run[1] for run in each]).mean()),
                "largest_token_error": max(run[2] for run in each),
                "minus_best_truncation": interval(right[name] - right[best]),
            }
        result[f"{ratio}x"] = rows
        print(task, ratio, {n: round(rows[n]["of_full"], 3) for n in runs}, file=sys.stderr, flush=True)
    return result


def timed(model: Any, tokenizer: Any, repeats: int) -> dict[str, Any]:
    """Seconds of compressing over those of the forward passes in it and over one of the plain texts."""
    items = held_out("stories", 32, 0)
    ids = [tokenizer("".join(item.sentences))["input_ids"] for item in items]
    asked = [tokenizer(f" {item.question}")["input_ids"] for item in items]
    scoring: Any = scores
    forward, spent = scoring.token_logps, [0.0]

    def clocked(*arguments: Any) -> Any:
        started = time.perf_counter()
        found = forward(*arguments)
        spent[0] += time.perf_counter() - started
        return found

    (plain,) = pack([TokenSequence([1, *text], 1) for text in ids])
    result = {}
    for method in METHODS:
        made = ContextCompressor(model, tokenizer, method=method, ratio=4)
        own, whole = [], []
        for _ in range(repeats + 1):
            spent[0] = 0.0
            scoring.token_logps = clocked
            started = time.perf_counter()
            made.compress_batch(ids, asked)
            total = time.perf_counter() - started
            scoring.token_logps = forward
            started = time.perf_counter()
            with torch.no_grad():
                forward(model, plain)
            own.append(total / spent[0])
            whole.append(total / (time.perf_counter() - started))
        medians = {"over_its_forward": own[1:], "over_a_forward_of_the_texts": whole[1:]}
        result[method] = {name: round(float(np.median(values)), 3) for name, values in medians.items()}
    return result


def figure(result: dict[str, Any], path: Path) -> None:
    """Share of full accuracy over the ratio, one panel for each task."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(12, 3.6), layout="constrained")
    for number, task in enumerate(TASKS):
        axes = drawn.add_subplot(1, len(TASKS), number + 1)
        for name in (*METHODS, *TRUNCATIONS):
            shares = [result[task][f"{ratio}x"][name]["of_full"] for ratio in RATIOS]
            axes.plot(RATIOS, shares, "o-" if name in METHODS else "s--", label=name)
        axes.axhline(0.95, color="grey", linewidth=0.8)
        axes.set(
            title=f"{task} (full text: {result[task]['full']:.2f})",
            xlabel="tokens of the text per kept token",
        )
        axes.set(xscale="log", ylim=(0, 1.1), ylabel="share of the full text's accuracy")
        axes.set_xticks(RATIOS, [f"{ratio}x" for ratio in RATIOS])
        axes.minorticks_off()
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    drawn.savefig(path, dpi=120)


def main() -> int:
    """Train, compress, answer, time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of the models")
    parser.add_argument("--steps", type=int, default=150, help="training steps of a model")
    parser.add_argument("--questions", type=int, default=60, help="of each task and seed")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5, help="of the timings")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = []
    for seed in range(options.seeds):
        models.append(scorer(options.work / f"scorer-{seed}", options.steps, seed))
        print(f"model {seed}: {time.process_time():.0f} s", file=sys.stderr, flush=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    result: dict[str, Any] = {"commit": commit.strip(), "seeds": list(range(options.seeds))}
    result["versions"] = {name: version(name) for name in ("torch", "transformers", "rlhf-models")}
    result |= {"steps": options.steps, "questions": options.questions}
    result |= {task: measured(models, task, options) for task in TASKS}
    small, tokenizer = models[0]
    larger = build_tiny_llama(len(tokenizer), hidden_size=256, num_layers=8, intermediate_size=1024)
    result["seconds"] = {"scorer": timed(small, tokenizer, options.repeats)}
    result["seconds"]["9M_parameters"] = timed(larger, tokenizer, options.repeats)
    if options.output:
        atomic_write_json(options.output, result)
    if options.figure:
        figure(result, options.figure)
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
