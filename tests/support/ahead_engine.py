"""A `StepEngine` in one process, as simple as can be: a copy of the model for every version."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from rlhf_data import PromptExample
from rlhf_infer import Rollout, SamplingParams, TransformersEngine


class AheadEngine:
    """Samples step s with the copy of version max(0, s - max_staleness), prompt by prompt."""

    def __init__(self, tokenizer: Any, max_staleness: int) -> None:
        self.max_staleness, self.exact, self.prompts_per_batch = max_staleness, not max_staleness, 1
        self.used: dict[int, int] = {}  # step -> version
        self._tokenizer = tokenizer
        self._copies: dict[int, Any] = {}
        self._newest = self._first = 0
        self._done: dict[int, list[list[Rollout]]] = {}
        self.eos_token_ids = [tokenizer.eos_token_id]

    def publish(self, model: Any, version: int) -> None:
        self._copies[version] = TransformersEngine(copy.deepcopy(model), self._tokenizer)
        self._newest = version

    def update_weights(self, model: Any) -> None:
        self.publish(model, self._newest)

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, *, first: int = 0
    ) -> list[list[Rollout]]:
        return self._sample(self._newest, prompts, n, params)

    def begin(self, step: int, prompts: Sequence[PromptExample], n: int, params: SamplingParams) -> None:
        if step not in self._done:
            self.used[step] = max(self._first, step - self.max_staleness)
            ids = [prompt.prompt_ids for prompt in prompts]
            self._done[step] = self._sample(self.used[step], ids, n, params)

    def finish(self, step: int) -> tuple[list[list[Rollout]], None]:
        return self._done[step], None

    def settle(self) -> None: ...

    def forget(self, step: int) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        self._done.clear()

    def restart(self, step: int) -> None:
        self._first = step
        self._done.clear()

    def close(self) -> None: ...

    def _sample(
        self, version: int, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams
    ) -> list[list[Rollout]]:
        return [group for prompt in prompts for group in self._copies[version].generate([prompt], n, params)]
