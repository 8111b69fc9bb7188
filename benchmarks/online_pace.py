"""A side of `grpo_vs_trl.py` or `ppo_vs_trl.py` as a process: it trains a step whenever it is told to.

Nothing here needs this toolkit, for one of the peers runs in an environment of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

_MOVE = 0.1
"""How far the policy of a check is from its reference, in standard deviations of each matrix."""


@dataclass(frozen=True)
class Task:
    """What a side is to do.

    Args:
        folder: has `policy`, the start model and the reference too, `reward`, a reward model, and
            `rows.json`: a list of `prompt` (text), `prompt_ids`, and `completions` (lists of token ids).
        prompts_per_step: of these.
        num_generations: completions of each.
        new_tokens: of each completion; no fewer, no more.
        steps: that there will be.
        threads: torch's.
        settings: of the trainer besides.
        side: "ours" or "trl".
        check: one step on the completions of the rows, its gradients kept; otherwise steps as told.
    """

    folder: str
    prompts_per_step: int
    num_generations: int
    new_tokens: int
    steps: int
    threads: int
    settings: dict[str, Any]
    side: str = ""
    check: bool = False

    @classmethod
    def read(cls, path: str) -> Self:
        """From a JSON file."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))

    def path(self, name: str) -> str:
        """Of something in the folder."""
        return str(Path(self.folder) / name)

    def read_rows(self) -> list[dict[str, Any]]:
        """Prompts with their completions."""
        return json.loads(Path(self.path("rows.json")).read_text(encoding="utf-8"))

    @property
    def completions_per_step(self) -> int:
        """Of all prompts of a step."""
        return self.prompts_per_step * self.num_generations


class Pace:
    """Talks with the parent: JSON lines out, a word a line in."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever libraries print is not an answer
        self._started = 0.0

    def ready(self, config: dict[str, Any]) -> None:
        """Everything is loaded: say with which settings, and wait for the first step."""
        self._send({"config": config, "memory_mb": peak_memory_mb()})
        self._wait()

    def step_done(self, **report: Any) -> None:
        """A step is over: report it, and wait for the next one, or for the other side's last."""
        seconds = time.perf_counter() - self._started
        self._send({"seconds": seconds, "memory_mb": peak_memory_mb(), **report})
        self._wait()

    def _send(self, message: dict[str, Any]) -> None:
        print(json.dumps(message, default=str), file=self._out, flush=True)

    def _wait(self) -> None:
        if not sys.stdin.readline():
            raise SystemExit("the benchmark has ended")
        self._started = time.perf_counter()


def start(task: Task) -> Pace:
    """Set up the process: threads, no network, no progress bars, no telemetry."""
    os.environ |= {"OMP_NUM_THREADS": str(task.threads), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}
    warnings.simplefilter("ignore")
    pace = Pace()
    import torch

    torch.set_num_threads(task.threads)
    torch.manual_seed(0)
    return pace


def peak_memory_mb() -> float:
    """The most resident memory that this process has had, in MB of 10**6 bytes; Linux only."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def move(model: Any) -> None:
    """Move a model's matrices by noise that depends on their names only, away from its reference."""
    import torch

    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            parameter.add_(noise.to(parameter.device), alpha=_MOVE * float(parameter.std()))


def save_gradients(named: Iterable[tuple[str, Any]], path: Path) -> None:
    """Write the gradients of parameters under their names."""
    from safetensors.torch import save_file

    gradients = {name: p.grad.detach().float().cpu().clone() for name, p in named if p.grad is not None}
    save_file(gradients, str(path))


def gradients_file(task: Task, update: int) -> Path:
    """Where a side's gradients of an update go, counted from 0."""
    return Path(task.path(f"{task.side}-gradients-{update}.safetensors"))


def vowels(completions: Sequence[str], **_: Any) -> list[float]:
    """A cheap reward: the share of vowels."""
    return [sum(map(text.count, "aeiou")) / max(len(text), 1) for text in completions]
