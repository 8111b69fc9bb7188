"""What rollout workers cost: a step with one of them and without, weights to several, a line of the ledger.

    uv run benchmarks/ray_overhead.py --steps 6 --hidden-size 512 --gigabytes 1 --workers 4

The two sides of a step take turns, in processes of this machine, with one thread each. Prints a JSON line.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlhf_algos import GRPOConfig, GRPOTrainer
from rlhf_algos.distributed.cluster import Cluster
from rlhf_algos.distributed.config import DistributedConfig
from rlhf_algos.distributed.controller import Controller
from rlhf_algos.distributed.ledger import GroupKey, Ledger
from rlhf_algos.distributed.weights import Published
from rlhf_algos.distributed.worker import EngineSetup, WorkerRole, digest_of, load_arrays, trained_arrays
from rlhf_data import PromptExample
from rlhf_infer import Rollout
from rlhf_infer.rewards import RewardFunctions
from rlhf_models import tiny_model, train_byte_tokenizer

_TOKENS, _PROMPTS, _NUM_GENERATIONS = 48, 4, 8


def main() -> None:
    """Parse the options, measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = DistributedConfig(address="local", rollout_workers=options.workers, object_store_gb=2.5)
    cluster = Cluster(config)
    cluster.release()
    try:
        row = measure_steps(options.steps, options.hidden_size)
        row |= measure_broadcast(options.gigabytes, options.workers) | measure_ledger()
    finally:
        cluster.close()
    print(json.dumps(row))


def measure_steps(steps: int, hidden_size: int) -> dict[str, Any]:
    """Seconds of a step on both sides, and the median ratio of neighbours."""
    tokenizer: Any = train_byte_tokenizer(["a story"])
    controller = Controller(
        DistributedConfig(rollout_workers=1),
        EngineSetup(1 << 18, 1),
        {"": WorkerRole(nn.Identity(), tokenizer)},  # the trainer publishes its own model
        eos_token_ids=[tokenizer.eos_token_id],
        prompts_per_batch=_PROMPTS,
    )
    try:
        sides = {
            "alone": _trainer(tokenizer, hidden_size),
            "worker": _trainer(tokenizer, hidden_size, controller),
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(steps + 1):
            for name, trainer in sides.items():
                started = time.perf_counter()
                trainer.train_step([trainer.examples[at] for at in range(_PROMPTS)])
                seconds[name].append(time.perf_counter() - started)
    finally:
        controller.close()
    pairs = list(zip(seconds["alone"][1:], seconds["worker"][1:], strict=True))
    return {
        "step_alone_s": round(statistics.median(alone for alone, _ in pairs), 3),
        "step_with_worker_s": round(statistics.median(other for _, other in pairs), 3),
        "ratio": round(statistics.median(other / alone for alone, other in pairs), 3),
        "first_step_with_worker_s": round(seconds["worker"][0], 1),
        "trained_mb": round(sum(4 * p.numel() for p in sides["alone"].parameters) / 1e6, 1),
    }


def _trainer(tokenizer: Any, hidden_size: int, engine: Any = None) -> GRPOTrainer:
    model = tiny_model("llama", vocab_size=len(tokenizer), seed=0, hidden_size=hidden_size)
    config = GRPOConfig(
        num_generations=_NUM_GENERATIONS,
        per_device_train_batch_size=_PROMPTS * _NUM_GENERATIONS,
        max_completion_length=_TOKENS,
        min_completion_length=_TOKENS,
        max_steps=1000,
    )
    prompts = [PromptExample(f"prompt {i}", tuple(range(3 + i, 35 + i)), {}) for i in range(_PROMPTS)]

    def even(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]

    rewards = RewardFunctions([even])
    return GRPOTrainer(model, config, prompts, rewards=rewards, tokenizer=tokenizer, engine=engine)


class _Reader:
    """A worker but for its engine: it takes up weights."""

    def __init__(self, numbers: int) -> None:
        self._model = _big(numbers)

    def ready(self) -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6

    def take_up(self, digest: str, weights: Any) -> float:
        import ray

        _, (reference,) = ray.get(weights.pull.remote("", digest))
        arrays: Any = ray.get(reference)
        load_arrays(WorkerRole(self._model, None), arrays)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def _big(numbers: int) -> torch.nn.Module:
    return torch.nn.ParameterDict({f"part{i}": torch.ones(numbers // 8) for i in range(8)})


def measure_broadcast(gigabytes: float, workers: int) -> dict[str, Any]:
    """Time to publish one version of the weights, and until all workers have loaded it."""
    import ray

    numbers = int(gigabytes * 1e9 / 4)
    actor = ray.remote(_Reader).options(num_cpus=1)
    readers: list[Any] = [actor.remote(numbers) for _ in range(workers)]
    before = ray.get([reader.ready.remote() for reader in readers])
    model, published = _big(numbers), Published()
    started = time.perf_counter()
    arrays = trained_arrays(WorkerRole(model, None))
    digest = digest_of(arrays)
    hashed = time.perf_counter()
    published.publish(digest, arrays)
    put = time.perf_counter()
    after = ray.get([reader.take_up.remote(digest, published.actor) for reader in readers])
    done = time.perf_counter()
    published.end()
    return {
        "weights_gb": gigabytes,
        "workers": workers,
        "digest_s": round(hashed - started, 2),
        "put_s": round(put - hashed, 2),
        "all_workers_s": round(done - put, 2),
        # what a worker maps of the object store counts as its own here, though all share it
        "worker_peak_gb_more": round(max(a - b for a, b in zip(after, before, strict=True)), 2),
    }


def measure_ledger(groups: int = 200, tokens: int = 512) -> dict[str, Any]:
    """Milliseconds to add a group of 8 completions, and its bytes per token."""
    group = [
        Rollout([1], list(range(1000, 1000 + tokens)), [-1 / (i + 3) for i in range(tokens)], "stop")
    ] * 8
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger")
        started = time.perf_counter()
        for step in range(groups):
            ledger.append(GroupKey(step, 0, "request", "weights"), [group])
        each = (time.perf_counter() - started) / groups
        ledger.close()
        size = ledger.path.stat().st_size
    return {
        "ledger_ms_per_group": round(1e3 * each, 2),
        "ledger_bytes_per_token": round(size / groups / 8 / tokens, 1),
    }


if __name__ == "__main__":
    main()
