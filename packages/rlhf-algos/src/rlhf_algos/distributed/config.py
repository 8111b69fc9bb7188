"""Settings of training and rollouts on a Ray cluster; loads neither ray nor torch."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rlhf_data import BaseConfig, RunFolder, UserError

WORKERS = "workers.jsonl"
"""File of a run: what happened to workers, and who sampled each step with which weights."""

Tell = Callable[[str, dict[str, Any]], None]
"""Called with the name of an event and its details."""

_ANSWERS_WITHIN = 10.0
"""Seconds within which a cluster must accept a connection."""


class ClusterConfig(BaseConfig):
    """A Ray cluster, and the training processes on it."""

    address: str = "auto"
    """`auto`: the cluster of RAY_ADDRESS or of `ray start`, else a local one; `local`: a new one on this
    machine, closed at the end; or an address such as 10.0.0.1:6379 or ray://10.0.0.1:10001."""
    trainer_workers: int = Field(default=0, ge=0)
    """Training processes on the cluster, which Ray Train starts as torchrun would; 0 trains in the process of
    the command."""
    min_trainer_workers: int | None = Field(default=None, ge=1)
    """Fewest processes to start or continue with if the cluster has no room for more; null waits for all."""
    cpus_per_trainer: int = Field(default=1, ge=1)
    """CPUs that a training process reserves, and threads that it computes with."""
    gpus_per_trainer: int = Field(default=0, ge=0, le=1)
    """1 gives every training process a GPU; 0 trains on CPUs."""
    max_trainer_failures: int = Field(default=3, ge=0)
    """Maximum number of losses of training processes, after each of which all continue from the last
    checkpoint; one more ends the run."""
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Workers on few machines or on many; STRICT insists."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray's runtime environment of the workers, such as {env_vars: {NAME: value}}."""
    start_timeout: float = Field(default=600.0, gt=0)
    """Seconds that resources and workers may take to come up, the model's loading included."""
    object_store_gb: float | None = Field(default=None, gt=0.1)
    """Memory for weights and completions in a local cluster, in GB; null takes Ray's share."""
    dashboard: bool = False
    """Start Ray's dashboard with a local cluster."""

    @model_validator(mode="after")
    def _trainers_are_some(self) -> Self:
        if self.min_trainer_workers is not None and self.min_trainer_workers > self.trainer_workers:
            raise ValueError(
                f"min_trainer_workers is {self.min_trainer_workers}, more than trainer_workers "
                f"{self.trainer_workers}; lower it, or raise trainer_workers"
            )
        if self.gpus_per_trainer and not self.trainer_workers:
            raise ValueError("gpus_per_trainer is set without trainer_workers; set these too")
        return self

    @model_validator(mode="after")
    def _someone_works(self) -> Self:
        if not self.trainer_workers:
            raise ValueError("trainer_workers is 0; set it, or leave distributed out")
        return self

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, address: str) -> str:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if address in ("auto", "local") or (host and port.isdecimal()):
            return address
        raise ValueError(f"{address!r} is not an address; expected auto, local, HOST:PORT or ray://HOST:PORT")


class DistributedConfig(ClusterConfig):
    """Where completions are sampled, how far ahead of the trainer, and what happens when a worker is lost."""

    rollout_workers: int = Field(default=1, ge=0)
    """Processes that sample completions; results do not depend on their number.  0, the default with
    `trainer_workers`, lets the training processes sample."""
    reward_workers: int = Field(default=0, ge=0)
    """Processes that score completions, each with reward functions, models and judges of its own; 0 scores
    in the trainer's process.  Results do not depend on their number."""
    max_staleness: int = Field(default=0, ge=0)
    """Steps by which sampling runs ahead: step s samples with the weights after max(0, s - N) steps; 0 waits
    for the newest, above 0 the difference is corrected with importance sampling."""
    cpus_per_worker: int = Field(default=1, ge=1)
    """CPUs that a worker reserves, and threads that it computes with, but not more than the trainer has."""
    gpus_per_worker: float = Field(default=0.0, ge=0)
    """GPUs that a worker reserves; 0 samples on CPUs."""
    gpus_per_reward_worker: float = Field(default=0.0, ge=0)
    """GPUs that a reward worker reserves; 0 scores on CPUs."""
    on_worker_loss: Literal["restart", "shrink", "stop"] = "restart"
    """If a worker is lost: replace it, continue with the others, or end the run."""
    group_timeout: float = Field(default=600.0, gt=0)
    """Seconds that a worker may take to sample or score a batch; then it counts as hung, and is killed."""
    max_worker_failures: int = Field(default=8, ge=0)
    """Losses within a step that are allowed for each worker there is; one more in all ends the run.  The loss
    of a machine counts all of its workers, and those started there before Ray notices."""
    max_group_failures: int = Field(default=2, ge=0)
    """Errors in sampling a batch of prompts after which it is tried again; one more ends the run.  An error
    of a reward function ends the run at once."""

    @model_validator(mode="before")
    @classmethod
    def _trainers_sample(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("trainer_workers"):
            return {"rollout_workers": 0, **values}
        return values

    @model_validator(mode="after")
    def _gpus_are_used(self) -> Self:
        if self.gpus_per_reward_worker and not self.reward_workers:
            raise ValueError("gpus_per_reward_worker is set without reward_workers; set these too")
        return self

    @model_validator(mode="after")
    def _someone_works(self) -> Self:
        if self.reward_workers and not self.rollout_workers:
            raise ValueError(
                "reward_workers score what rollout workers sample, and rollout_workers is 0; set it too, or "
                "leave reward_workers out"
            )
        if not (self.trainer_workers or self.rollout_workers):
            raise ValueError("rollout_workers and trainer_workers are 0; set one, or leave distributed out")
        return self


def samplers(config: BaseConfig) -> DistributedConfig | None:
    """The section `distributed` of settings that have completions sampled by workers; else None."""
    found = getattr(config, "distributed", None)
    return found if isinstance(found, DistributedConfig) and found.rollout_workers else None


def trainers(config: BaseConfig) -> ClusterConfig | None:
    """The section `distributed` of settings whose training processes are on a cluster; else None."""
    found = getattr(config, "distributed", None)
    return found if isinstance(found, ClusterConfig) and found.trainer_workers else None


def check_started(settings: BaseConfig) -> None:
    """Refuse to train in one process what the settings have trained by several on a cluster.

    Raises:
        UserError: this process is not one of them.
    """
    cluster = trainers(settings)
    if cluster is not None and "RANK" not in os.environ:  # Ray Train has it set, as torchrun does
        raise UserError(
            f"distributed.trainer_workers is {cluster.trainer_workers}, and one process trains here; start "
            "it with the command of the method, such as rlhf-train sft, or leave trainer_workers out",
            code="unsupported_key",
            key="distributed.trainer_workers",
        )


def check_not_quantised(settings: BaseConfig) -> None:
    """Refuse a model whose weights rollout workers cannot follow.

    Args:
        settings: the section with its settings.

    Raises:
        ValueError: it is in 8 or 4 bits.
    """
    for key in ("load_in_8bit", "load_in_4bit"):
        if getattr(settings, key, False):
            raise ValueError(
                f"{key} is set, and rollout workers cannot follow quantised weights; leave it or "
                "distributed.rollout_workers out"
            )


def check_reachable(config: ClusterConfig) -> None:
    """Refuse a cluster that nothing answers for, which Ray itself would try to reach for minutes.

    Raises:
        UserError: nothing listens at the address.
    """
    address = os.environ.get("RAY_ADDRESS", "") if config.address == "auto" else config.address
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal()):
        return
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWERS_WITHIN).close()
    except OSError as error:
        raise cluster_unreachable(address, error) from error


def started_cluster() -> str | None:
    """The cluster that `ray start` has begun or joined on this machine last, if it answers."""
    temp = os.environ.get("RAY_TMPDIR") or (sys.platform == "linux" and os.environ.get("TMPDIR")) or "/tmp"
    try:
        address = Path(temp, "ray", "ray_current_cluster").read_text(encoding="utf-8").strip()
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=_ANSWERS_WITHIN).close()
    except (OSError, ValueError):
        return None
    return address


def cluster_unreachable(address: str, error: Exception) -> UserError:
    """The error where no cluster answers at an address."""
    return UserError(
        f"distributed.address: no Ray cluster at {address} ({' '.join(str(error).split())[:300]}); start one "
        "with ray start --head, or take the address local",
        code="cluster_unreachable",
        address=address,
    )


def require_ray(config: ClusterConfig) -> None:
    """Refuse a job on a cluster where Ray, or what its dashboard needs, is missing.

    Raises:
        UserError: it is.
    """
    missing = "ray" if importlib.util.find_spec("ray") is None else None
    if not missing and config.dashboard and importlib.util.find_spec("aiohttp_cors") is None:
        missing = "aiohttp-cors, which distributed.dashboard needs,"
    if missing:
        raise UserError(
            f'{missing} is not installed; run pip install "rlhf-algos[ray]"', code="missing_package"
        )


def told_to(run: RunFolder) -> Tell:
    """A callback that logs events of workers and training processes to a run's `workers.jsonl`."""

    def tell(event: str, facts: dict[str, Any]) -> None:
        run.append_lines(WORKERS, [{"event": event, "time": round(time.time(), 3), **facts}])

    return tell
