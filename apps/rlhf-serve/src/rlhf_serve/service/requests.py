"""A request to the service, and the seconds that its parts took."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_data import Text
from rlhf_infer import ConfidenceBasedStopping, SamplingParams, SearchSettings, Selection


@dataclass(frozen=True)
class GenerationRequest:
    """Settings of a request for one prompt.

    Args:
        prompt: the reward functions' prompt: a text or messages.
        prompt_ids: the policy's prompt.
        n: number of choices returned.
        candidates: number of completions sampled, with `stopping` at most; without `search`.
        stopping: ends drawing when the best is unlikely to be beaten; None draws all.
        selection: how choices are ranked.
        scored: whether candidates are scored.
        params: how candidates are drawn.
        reproducible: whether the same seed has to give the same candidates.
        logps: whether log-probs of their tokens are needed.
        columns: further values that reward functions read.
        prompt_logprobs: likeliest tokens reported with the prompt's; None for no log-probs of the prompt.
        draws: whether anything is drawn; else the one candidate is empty.
        search: how a tree is searched in place of drawing candidates.
    """

    prompt: Text
    prompt_ids: tuple[int, ...]
    n: int
    candidates: int
    stopping: ConfidenceBasedStopping | None
    selection: Selection
    scored: bool
    params: SamplingParams
    reproducible: bool
    logps: bool
    columns: Mapping[str, Any] = field(default_factory=dict)
    prompt_logprobs: int | None = None
    draws: bool = True
    search: SearchSettings | None = None


@dataclass
class Timing:
    """Seconds that parts of a request took; of several prompts the sums, and those of each."""

    queue_s: float = 0.0
    generate_s: float = 0.0
    score_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)
    prompts: list[Timing] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The seconds, and those since the request started."""
        found: dict[str, Any] = {"queue_s": round(self.queue_s, 4), **self._work()}
        found["total_s"] = round(time.perf_counter() - self.started, 4)
        return found | ({"prompts": [each._work() for each in self.prompts]} if self.prompts else {})

    def _work(self) -> dict[str, float]:
        return {"generate_s": round(self.generate_s, 4), "score_s": round(self.score_s, 4)}
