"""A planted search task: codes of rare right steps, a policy that draws them, process rewards good and wrong.

The code of a prompt has `DEPTH` symbols, one a step. The policy draws every symbol by itself: the right one
with probability `RARE`, another otherwise. The good process reward scores a right step high and a wrong one
low, with noise; the wrong one prefers a certain wrong symbol and cannot tell the others apart.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
from collections.abc import Sequence
from typing import Any, Literal

import torch

from rlhf_infer import PathScores, Rollout, SamplingParams, ScoredPath
from rlhf_infer.engines.sampler import uniforms
from rlhf_models import StepAggregate, aggregate_step_scores

SYMBOLS = "abcdefgh"
DEPTH = 5
RARE = 0.25
"""Probability of the right symbol."""
NOISE = 1.0
"""Standard deviation of the process reward's logits, whose mean is 2 or -2."""
_CHARACTERS = "\0" + SYMBOLS + "\n>0123456789"


class CharacterTokenizer:
    """A token for every character; 0 is the end token."""

    eos_token, eos_token_id, unk_token_id, chat_template = "\0", 0, None, None

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        """Token ids of a text."""
        return {"input_ids": [_CHARACTERS.index(each) for each in text]}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False, **options: Any) -> str:
        """The text of token ids."""
        return "".join(_CHARACTERS[each] for each in ids if each or not skip_special_tokens)


@functools.cache
def code(prompt: str, kind: str = "right") -> str:
    """The symbols of a prompt that are right; of the kind "bait", those that the wrong reward prefers."""
    right = random.Random(f"planted/{prompt}").choices(SYMBOLS, k=DEPTH)
    if kind == "right":
        return "".join(right)
    rng = random.Random(f"planted/bait/{prompt}")
    return "".join(rng.choice([each for each in SYMBOLS if each != symbol]) for symbol in right)


class PlantedEngine:
    """The policy as a generation engine; counts the tokens that it drew."""

    def __init__(self) -> None:
        self.eos_token_ids, self.tokenizer, self.drawn = [0], CharacterTokenizer(), 0

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, *, first: int = 0
    ) -> list[list[Rollout]]:
        """See `rlhf_infer.GenerationEngine`."""
        keys = [tuple(prompt) for prompt in prompts]
        numbers = uniforms(keys, range(first, first + n), params).view(len(keys), n, -1).tolist()
        return [
            [self._draw(key, own, params) for own in rows] for key, rows in zip(keys, numbers, strict=True)
        ]

    def _draw(self, prompt: tuple[int, ...], numbers: Sequence[float], params: SamplingParams) -> Rollout:
        ids: list[int] = []
        logps: list[float] = []
        for number in numbers:
            token, p = self._next(self.tokenizer.decode([*prompt, *ids]), number, params.temperature == 0)
            ids.append(token)
            logps.append(math.log(p))
            if token == 0 or any(stop in self.tokenizer.decode(ids) for stop in params.stop):
                break
        self.drawn += len(ids)
        ended = len(ids) < len(numbers) or ids[-1] == 0
        ended = ended or any(stop in self.tokenizer.decode(ids) for stop in params.stop)
        return Rollout(prompt, ids, logps, "stop" if ended else "length")

    def _next(self, text: str, number: float, greedy: bool) -> tuple[int, float]:
        """The next token and its probability."""
        prompt, _, steps = text.partition(">")
        depth = steps.count("\n")
        if depth == DEPTH:
            return 0, 1.0
        if steps and not steps.endswith("\n"):
            return _CHARACTERS.index("\n"), 1.0
        right = code(prompt)[depth]
        others = [each for each in SYMBOLS if each != right]
        # The likeliest symbol is a wrong one, so that greedy decoding is never right.
        odds = {right: RARE, others[0]: 1.5 * RARE}
        odds |= {each: (1 - 2.5 * RARE) / (len(others) - 1) for each in others[1:]}
        if greedy:
            return _CHARACTERS.index(others[0]), odds[others[0]]
        for symbol, p in odds.items():
            number -= p
            if number < 0:
                return _CHARACTERS.index(symbol), p
        return _CHARACTERS.index(symbol), p

    def update_weights(self, model: Any) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class PlantedReward:
    """The process reward, good or wrong: one score in [0, 1] from the logits of the steps so far."""

    bounded = True

    def __init__(self, kind: Literal["good", "wrong"], aggregate: StepAggregate = "min") -> None:
        self.kind, self.name = kind, f"{kind}_process_reward"
        self.aggregate: StepAggregate = aggregate

    def score(self, paths: Sequence[ScoredPath]) -> PathScores:
        """See `rlhf_infer.PathScorer`."""
        values = [self._value(str(path.prompt), path.text) for path in paths]
        alone = sum(len(path.prompt_ids) + len(path.completion_ids) for path in paths)
        return PathScores(values, alone, alone)

    def _value(self, prompt: str, text: str) -> float:
        steps = [step for step in text.split("\n") if step.strip()]
        liked = code(prompt.removesuffix(">"), "right" if self.kind == "good" else "bait")
        logits = []
        for depth, step in enumerate(steps[:DEPTH]):
            key = hashlib.blake2b(f"{prompt}{steps[: depth + 1]}".encode(), digest_size=8).digest()
            noise = random.Random(key).gauss(0, NOISE)
            logits.append((2.0 if step == liked[depth] else -2.0) + noise)
        return float(aggregate_step_scores(torch.tensor(logits), self.aggregate)) if logits else 0.0


def is_right(prompt: str, text: str) -> bool:
    """Whether a completion is the whole code."""
    return text.split() == list(code(prompt.removesuffix(">")))
