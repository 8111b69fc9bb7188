"""What speculation saves: rollouts of GRPO that guess the last epoch's completions, and single completions.

    uv run python benchmarks/speculation.py --output benchmarks/results/speculation.json

The model is stories260k of ../shared/data, on one thread. In `rollouts` two trainers take the same steps
in turn, one with `speculation=previous`, on 4 prompts x 8 completions; `completions` compares engines
call by call. Whoever begins changes. Seconds are those of this process on a processor, so that others on
the machine count less; ratios are plain / speculative, above 1 is faster with speculation, medians over
steps or calls. `same` is the share of completions that are equal token for token; others differ by
rounding, where two tokens are equally likely. `early_layers` guesses by the model's first three layers of
five, `early_layers_tree` with two alternatives; `tokens_per_pass` is of passes with guesses only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlhf_algos import GRPOConfig, GRPOTrainer
from rlhf_data import PromptExample, atomic_write_json, finite
from rlhf_infer import (
    DraftModel,
    NgramDrafter,
    Rollout,
    SamplingParams,
    SpeculativeDecoder,
    TransformersEngine,
)
from rlhf_infer.engines.speculation import Payoff
from rlhf_infer.rewards import RewardFunctions
from rlhf_models import AttentionPlan, load_causal_lm, load_tokenizer

MODEL = Path(__file__).resolve().parents[2] / "shared/data/stories260k"
NAMES = ("Lily", "Tom", "Sam", "Ben", "Mia", "Anna", "Max", "Sue")
STARTS = (
    "Once upon a time, there was a little girl named {}.",
    "One day, {} went to the park with a",
    "{} had a big red ball.",
    "{} saw a dog in the",
)
REPETITIVE = "Lily saw a red ball. Tom saw a red ball. " * 4
RUNS = (
    {"learning_rate": 1e-6, "common_random_numbers": True},
    {"learning_rate": 1e-5, "common_random_numbers": True},
    {"learning_rate": 1e-4, "common_random_numbers": True},
    {"learning_rate": 1e-6, "common_random_numbers": False},
)
Made = tuple[float, list[list[int]]]


def the_word_the(completions: Sequence[str], **columns: Any) -> list[float]:
    """A reward that a few steps raise."""
    del columns
    return [text.count(" the ") / (1 + len(text) / 100) for text in completions]


class Timed:
    """A trainer on its own copy of the model; takes a step, and says what its parts took."""

    def __init__(self, settings: dict[str, Any], epochs: int, tokens: int, prompts: Sequence[PromptExample]):
        config = {"max_completion_length": tokens, "num_generations": 8, "per_device_train_batch_size": 32}
        config |= {"num_train_epochs": epochs, "lr_scheduler_type": "constant", "seed": 0}
        self.trainer = GRPOTrainer(
            load_causal_lm(MODEL),
            GRPOConfig.from_dict(config | settings),
            prompts,
            rewards=RewardFunctions([the_word_the]),
            tokenizer=load_tokenizer(MODEL),
        )
        self._sample = self.trainer.sample
        self.trainer.sample = self._timed  # the rest of a step is as it is

    def _timed(self, *args: Any, **options: Any) -> list[list[Rollout]]:
        started = time.process_time()
        groups = self._sample(*args, **options)
        self.sampling = time.process_time() - started
        self.drawn = [rollout.completion_ids for group in groups for rollout in group]
        return groups

    def step(self, prompts: Sequence[PromptExample]) -> dict[str, float]:
        """A training step on these prompts; its metrics."""
        started = time.process_time()
        metrics = self.trainer.train_step(prompts)
        self.whole = time.process_time() - started
        return metrics


def rollouts(settings: dict[str, Any], *, epochs: int, tokens: int) -> dict[str, Any]:
    """Both trainers through all epochs, a step of each in turn."""
    encode = load_tokenizer(MODEL).encode
    texts = [start.format(name) for name in NAMES for start in STARTS]
    prompts = [PromptExample(text, tuple(encode(text)), {}) for text in texts]
    plain = Timed(settings, epochs, tokens, prompts)
    guessing = Timed(settings | {"speculation": "previous"}, epochs, tokens, prompts)
    found: dict[str, Any] = {**settings, "tokens": tokens, "epochs": []}
    for epoch in range(epochs):
        steps = []
        for at in range(0, len(prompts), 4):
            sides = (plain, guessing) if (at // 4 + epoch) % 2 else (guessing, plain)
            metrics = {id(side): side.step(prompts[at : at + 4]) for side in sides}
            agreement = metrics[id(guessing)].get("speculation/agreement")
            same = [a == b for a, b in zip(plain.drawn, guessing.drawn, strict=True)]
            share = plain.sampling / plain.whole
            steps.append(
                {
                    "agreement": agreement,
                    "same": statistics.mean(same),
                    "rollout_ratio": plain.sampling / guessing.sampling,
                    "step_ratio": plain.whole / guessing.whole,
                    "predicted_step_ratio": 1 / (1 - share + share * guessing.sampling / plain.sampling),
                    "rollout_seconds": plain.sampling,
                    "reward": metrics[id(plain)]["reward"],
                }
            )
        # The first step of the second epoch learns how far epochs agree, and does not guess yet.
        steps = steps[1:] if epoch == 1 else steps
        known = {key: [step[key] for step in steps if step[key] is not None] for key in steps[0]}
        found["epochs"].append({key: statistics.median(values) for key, values in known.items() if values})
    return found


def timed(make: Callable[[], list[list[int]]]) -> Made:
    """Processor seconds, and what was drawn."""
    started = time.process_time()
    drawn = make()
    return time.process_time() - started, drawn


def early_layers(layers: int) -> Any:
    """The first layers of the model with its head, as a draft model."""
    whole = load_causal_lm(MODEL)
    whole.model.layers = whole.model.layers[:layers]
    whole.config.num_hidden_layers = layers
    return whole


def by_transformers(
    model: Any, prompt: list[int], seed: int, *, temperature: float, tokens: int, **options: Any
) -> list[list[int]]:
    """One completion of a prompt by transformers' own generation."""
    torch.manual_seed(seed)
    options |= {"do_sample": bool(temperature)} | (
        {"temperature": temperature, "top_k": 0} if temperature else {}
    )
    options |= {"max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0}
    ids = torch.tensor([prompt])
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, len(prompt) :].tolist()


def completions(*, text: str, n: int, temperature: float, tokens: int, repeats: int) -> dict[str, Any]:
    """One prompt or several through every engine, in turn; the first round warms up and does not count."""
    model, tokenizer = load_causal_lm(MODEL), load_tokenizer(MODEL)
    texts = [text] if n == 1 else [start.format("Lily") for start in STARTS]
    ids = [tokenizer.encode(each) for each in texts]
    engines = {
        "plain": TransformersEngine(model, tokenizer),
        "ngram": SpeculativeDecoder(model, tokenizer, NgramDrafter()),
    }
    for name, alternatives in (("early_layers", 0), ("early_layers_tree", 2)):
        drafts = DraftModel(early_layers(3), tokenizer, alternatives=alternatives)
        engines[name] = SpeculativeDecoder(model, tokenizer, drafts)
    theirs: Any = load_causal_lm(MODEL)
    theirs.set_attn_implementation("sdpa")
    sides: dict[str, Callable[[int], list[list[int]]]] = {}

    def ours(engine: TransformersEngine, seed: int) -> list[list[int]]:
        groups = engine.generate(ids, n, SamplingParams(tokens, temperature, seed=seed, ignore_eos=True))
        return [rollout.completion_ids for group in groups for rollout in group]

    for name, engine in engines.items():
        sides[name] = lambda seed, engine=engine: ours(engine, seed)
    if n == 1:
        generate = partial(by_transformers, theirs, ids[0], temperature=temperature, tokens=tokens)
        sides["transformers"] = generate
        sides["transformers_assisted"] = partial(generate, prompt_lookup_num_tokens=10)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    same: list[bool] = []
    for round_ in range(repeats + 1):
        drawn = {}
        for name in list(sides)[:: 1 if round_ % 2 else -1]:
            took, drawn[name] = timed(partial(sides[name], round_))
            seconds[name].append(took)
        if round_:
            same += [a == b for a, b in zip(drawn["plain"], drawn["ngram"], strict=True)]
    per_pass = {
        name: tokens_per_pass(engine, ids[:1], temperature, tokens) for name, engine in engines.items()
    }
    medians = {name: statistics.median(each[1:]) for name, each in seconds.items()}
    pairs = {
        name: statistics.median(p / s for p, s in zip(seconds["plain"][1:], each[1:], strict=True))
        for name, each in seconds.items()
    }
    return {
        "seconds": medians,
        "ratio_to_plain": pairs,
        "tokens_per_pass": per_pass,
        "same": statistics.mean(same),
    }


class Always(Payoff):
    """Guesses in every pass, whatever that costs."""

    def pays(self, rows: int) -> bool:
        """Always."""
        del rows
        return True


def tokens_per_pass(
    engine: TransformersEngine, ids: list[list[int]], temperature: float, tokens: int, seeds: int = 8
) -> float:
    """Tokens of a completion that a forward pass brings where every pass has guesses, a mean over seeds."""
    passes, forward = 0, engine._forward

    def counted(ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        nonlocal passes
        passes += 1
        return forward(ids, positions, plan)

    engine._forward = counted
    if isinstance(engine, SpeculativeDecoder):
        engine._payoff = Always()
    for seed in range(seeds):
        engine.generate(ids, 1, SamplingParams(tokens, temperature, seed=seed, ignore_eos=True))
    return seeds * (tokens - 1) / (passes - seeds)  # the first token comes with the prompt


def main() -> None:
    """Measure, print JSON, and keep it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    engine = {"tokens": options.tokens, "repeats": options.repeats}
    cases: dict[str, dict[str, Any]] = {
        "batch 1, greedy, repetitive": {"text": REPETITIVE, "n": 1, "temperature": 0.0},
        "batch 1, greedy, story": {"text": STARTS[0].format("Lily"), "n": 1, "temperature": 0.0},
        "batch 1, temperature 1, story": {"text": STARTS[0].format("Lily"), "n": 1, "temperature": 1.0},
        "batch 32, temperature 1": {"text": "", "n": 8, "temperature": 1.0},
    }
    result = {
        "completions": {name: completions(**case, **engine) for name, case in cases.items()},
        "rollouts": [rollouts(run, epochs=options.epochs, tokens=options.tokens) for run in RUNS],
    }
    shares = [epoch["same"] for run in result["rollouts"] for epoch in run["epochs"]]
    shares += [case["same"] for case in result["completions"].values()]
    assert min(shares) > 0.95, f"both sides did not do the same work: {shares}"
    result = finite(result)
    print(json.dumps(result, indent=1))
    if options.output:
        atomic_write_json(options.output, result)


if __name__ == "__main__":
    main()
