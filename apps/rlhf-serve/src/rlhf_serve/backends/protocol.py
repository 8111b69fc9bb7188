"""The protocol of backends: requests and capabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlhf_infer import Constraint, OnToken, PromptLogps, Rollout, SamplingParams


@dataclass(frozen=True)
class Draw:
    """Samples of one prompt that are requested from a backend.

    `first` is the index of the first sample; `reproducible` samples are the same for the same seed, which may
    cost time; without `logps` rollouts may have none.
    """

    prompt: Sequence[int]
    n: int
    params: SamplingParams
    first: int = 0
    reproducible: bool = True
    logps: bool = True


GAUGES = {
    "kv_tokens": "Tokens whose keys and values are held",
    "kv_tokens_limit": "Tokens whose keys and values can be held",
    "paused_cohorts": "Batches of requests that wait for memory in the middle of their completions",
    "preemptions": "Times a batch of requests has given up its keys and values, so far",
    "guesses": "Tokens that a draft has guessed, so far",
    "right_guesses": "Guessed tokens that became part of a completion, so far",
}
"""The gauges of `Backend.memory`."""


class Backend(Protocol):
    """Generates for many requests at a time."""

    name: str
    tokenizer: Any
    max_model_len: int
    """Longest prompt and completion in tokens."""
    max_batch_tokens: int
    """The same, as far as memory allows."""
    vocab_size: int
    """Tokens that the model has, which may be fewer than the tokenizer's."""
    eos_token_ids: list[int]
    """Tokens that end a completion."""

    @property
    def dead(self) -> bool:
        """Whether the engine has stopped for good, so that no request can be answered any more."""
        ...

    async def generate(self, draw: Draw, on_token: OnToken | None = None) -> list[Rollout]:
        """The samples `first` to `first + n - 1` of a prompt; cancelling the call ends them.

        With `raw_logprobs` in the parameters, `on_token` receives log-probs at temperature 1, and rollouts
        have them.

        Raises:
            UserError: the request cannot be met.
        """
        ...

    async def prompt_logps(self, prompts: Sequence[Sequence[int]], top: int) -> list[PromptLogps]:
        """Log-probs of the tokens of prompts, and of the `top` likeliest tokens in their places."""
        ...

    def check_constraint(self, constraint: Constraint) -> None:
        """Refuse a form that completions cannot be held to; not from the event loop's thread.

        Raises:
            UserError: it is malformed, or asks for what is not enforced.
        """
        ...

    def run_work(self, work: Callable[[], Any]) -> Any:
        """Run work of another model where it disturbs generation least; not from the event loop's thread."""
        ...

    def memory(self) -> dict[str, float]:
        """Memory for keys and values now, and guesses so far: `GAUGES` by name; empty if not known."""
        ...

    async def close(self) -> None:
        """Give up what is running."""
        ...
