"""Connecting to a Ray cluster, or starting one on this machine that ends with this process."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from typing import Any, Literal

from rlhf_algos.distributed.config import (
    ClusterConfig,
    DistributedConfig,
    Tell,
    check_reachable,
    cluster_unreachable,
    require_ray,
    started_cluster,
)
from rlhf_data import UserError

_LOG = logging.getLogger(__name__)
_ROOM = "rlhf-workers"
"""Name of the room of workers that a command keeps for its training processes."""
_EXPIRES = 180.0
"""Seconds after which room counts as free that nobody says is taken."""
Kind = Literal["rollout", "reward"]
"""Kind of a worker: it samples completions, or scores them."""
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is reported to anyone
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else `uv run` makes Ray ship the working folder to every worker
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TQDM_PATCH_PRINT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # else Ray Train changes the working folder
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
}


class Connection(ABC):
    """A connection to a Ray cluster, with room for processes; subclasses say for which.

    A process that is connected already stays connected, and its cluster is used.

    Args:
        config: the settings.
        name: of the room, for `Cluster` in a training process to find it.

    Attributes:
        local: whether the cluster was started here, and ends with this connection.
        dashboard: the address of Ray's dashboard, where it was started here with one.
    """

    def __init__(self, config: ClusterConfig, *, name: str = "") -> None:
        require_ray(config)
        check_reachable(config)
        for key, value in _ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        import ray

        self.settings, self.local = config, False
        self.dashboard: str | None = None
        self._group: Any = None
        self._name, self._is_own = name, True
        self._leaving = False
        self._connected_here = not ray.is_initialized()
        if self._connected_here:
            handler = signal.getsignal(signal.SIGTERM)
            self._connect()
            if threading.current_thread() is threading.main_thread() and handler is not None:
                signal.signal(signal.SIGTERM, handler)  # Ray's own would end the process at once
        try:
            self._reserve()
        except BaseException:
            self.close()
            raise

    def release(self) -> None:
        """Give the room of the workers back."""
        import ray
        from ray.util import remove_placement_group

        if self._group is not None and self._is_own and ray.is_initialized():
            remove_placement_group(self._group)
        self._group = None

    def close(self) -> None:
        """Give the room back, and end the connection; a local cluster ends with it."""
        import ray

        self.release()
        if self._connected_here:
            ray.shutdown()
            _let_daemons_print(True)

    def _connect(self) -> None:
        import ray

        address = self.settings.address
        if address == "auto":  # Ray's own would also join a local cluster of another run, and end with it
            address = os.environ.get("RAY_ADDRESS") or started_cluster() or "local"
        quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        try:
            if address == "local":
                self._start_local(quiet)
            else:
                ray.init(address, **quiet)
                _LOG.info("connected to the Ray cluster %s", ray.get_runtime_context().gcs_address)
        except Exception as error:  # Ray raises what comes, a plain Exception where a node is slow to start
            raise cluster_unreachable(address, error) from error
        _let_daemons_print(False)

    def _start_local(self, quiet: dict[str, Any]) -> None:
        """A cluster of this machine, which counts as having as many CPUs as the processes reserve."""
        import ray

        config = self.settings
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # it listens on this machine only
        os.environ.setdefault("RAY_worker_niceness", "0")  # else a busy machine starves workers
        bundles = self.bundles()
        reserved = int(sum(bundle["CPU"] for bundle in bundles))
        cpus = os.cpu_count() or 1
        if reserved > cpus:
            _LOG.warning("%d workers reserve %d CPUs of %d", len(bundles), reserved, cpus)
        store = None if config.object_store_gb is None else int(config.object_store_gb * 1e9)
        context = ray.init(
            "local",
            num_cpus=max(reserved, cpus),
            include_dashboard=config.dashboard,
            object_store_memory=store,
            _node_ip_address="127.0.0.1",
            **quiet,
        )
        self.local = True
        page = getattr(context, "dashboard_url", None)
        self.dashboard = f"http://{page}" if page else None
        _LOG.info(
            "started a local Ray cluster%s", f", with its dashboard at {self.dashboard}" if page else ""
        )

    @abstractmethod
    def bundles(self) -> list[dict[str, float]]:
        """Resources of each process."""

    def needed(self) -> list[dict[str, float]]:
        """Those of `bundles` without which nothing begins."""
        return self.bundles()

    @abstractmethod
    def asked(self) -> tuple[str, str]:
        """The processes in words, and the setting that has their number."""

    def _reserve(self) -> None:
        """Wait until the cluster has room for the processes."""
        import ray
        from ray.util import placement_group

        config, bundles = self.settings, self.needed()
        self._group = placement_group(bundles, strategy=config.placement, name=self._name)
        patience = config.start_timeout if self._may_come_to_have_room() else 1.0
        until = time.monotonic() + patience
        while not self._group.wait(1):  # signals act between waits
            if time.monotonic() < until:
                continue
            free = {
                name: count for name, count in ray.available_resources().items() if name in ("CPU", "GPU")
            }
            words, key = self.asked()
            raise UserError(
                f"the Ray cluster has no room for {words}, placed {config.placement}, after {patience:g} s; "
                f"free are {free or 'no CPUs'}: lower distributed.{key}, or add machines",
                code="no_room_in_cluster",
                workers=len(bundles),
            )

    def _may_come_to_have_room(self) -> bool:
        """Whether waiting could help: a cluster that was started here has what it has."""
        import ray

        bundles = self.bundles()
        wanted = sum(bundle.get("GPU", 0.0) for bundle in bundles)
        apart = self.settings.placement == "STRICT_SPREAD" and len(self.needed()) > 1
        return not self.local or not (apart or wanted > ray.cluster_resources().get("GPU", 0.0))


class Cluster(Connection):
    """A connection with room for workers that sample and score.

    A training process on the cluster uses the room that its command keeps, so that it outlives the process.

    Args:
        config: the settings.
        for_trainers: whether this is the command's.
    """

    def __init__(self, config: DistributedConfig, *, for_trainers: bool = False) -> None:
        self.config = config
        super().__init__(config, name=_ROOM if for_trainers else "")

    def workers(self, kind: Kind) -> int:
        """How many workers of a kind there are to be."""
        return self.config.rollout_workers if kind == "rollout" else self.config.reward_workers

    def options(self, kind: Kind, number: int) -> dict[str, Any]:
        """Ray's options of a worker: what it reserves, and where."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = number if kind == "rollout" else self.workers("rollout") + number
        options: dict[str, Any] = {"num_cpus": self.config.cpus_per_worker}
        options["num_gpus"] = _gpus(self.config, kind)
        if self.config.runtime_env:
            options["runtime_env"] = self.config.runtime_env
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place)
        return options | {"scheduling_strategy": strategy}

    def leave_if_drained(self, tell: Tell) -> None:
        """Have this process stop as SIGTERM does, with a checkpoint, once `ray drain-node` gives its notice.

        Machines that only have workers may leave without a checkpoint: they hold no state of the training.
        Ray Train starts training processes again elsewhere.

        `tell` is called with that event, once.
        """
        import ray
        from ray._private.state import state  # private, as in Ray Train: Ray has no public API for this
        from ray.util.client import ray as client

        if self.local or self._leaving or not self._is_own or client.is_connected():
            return
        if ray.get_runtime_context().get_node_id() in state.get_draining_nodes():
            self._leaving = True
            tell("drained", {})
            os.kill(os.getpid(), signal.SIGTERM)

    def bundles(self) -> list[dict[str, float]]:
        """Resources of each worker: those that sample, then those that score."""
        return _bundles(self.config)

    def asked(self) -> tuple[str, str]:
        """See `Connection.asked`."""
        config = self.config
        words = f"{config.rollout_workers} workers of {_bundle(config, 'rollout')} each"
        if config.reward_workers:
            words += f" and {config.reward_workers} reward workers of {_bundle(config, 'reward')} each"
        return words, "rollout_workers"

    def _reserve(self) -> None:
        if not (self._connected_here or self._name):  # perhaps a training process, whose command keeps room
            from ray.util import get_placement_group

            with contextlib.suppress(ValueError):  # there is none
                self._group, self._is_own = get_placement_group(_ROOM), False
                return
        super()._reserve()


def _bundles(config: DistributedConfig) -> list[dict[str, float]]:
    bundles = [_bundle(config, "rollout")] * config.rollout_workers
    return bundles + [_bundle(config, "reward")] * config.reward_workers


def _bundle(config: DistributedConfig, kind: Kind) -> dict[str, float]:
    """Resources of a worker."""
    reserved = {"CPU": float(config.cpus_per_worker), "GPU": _gpus(config, kind)}
    return {name: count for name, count in reserved.items() if count}


def _gpus(config: DistributedConfig, kind: Kind) -> float:
    return config.gpus_per_worker if kind == "rollout" else config.gpus_per_reward_worker


class TrainerCluster(Connection):
    """A connection with room for training processes, which Ray Train takes after `release`."""

    def bundles(self) -> list[dict[str, float]]:
        """Resources of each training process, and of each of their workers."""
        settings = self.settings
        workers = _bundles(settings) if isinstance(settings, DistributedConfig) else []
        return [self.resources()] * settings.trainer_workers + workers

    def needed(self) -> list[dict[str, float]]:
        """Resources that training processes need to start; those of their workers are separate."""
        settings = self.settings
        return [self.resources()] * (settings.min_trainer_workers or settings.trainer_workers)

    def asked(self) -> tuple[str, str]:
        """See `Connection.asked`."""
        key = "min_trainer_workers" if self.settings.min_trainer_workers else "trainer_workers"
        return f"{len(self.needed())} training processes of {self.resources()} each", key

    def resources(self) -> dict[str, float]:
        """Resources of a training process."""
        reserved = {
            "CPU": float(self.settings.cpus_per_trainer),
            "GPU": float(self.settings.gpus_per_trainer),
        }
        return {name: count for name, count in reserved.items() if count}


class TakenRoom:
    """Tells what scales Ray Train how much room workers have taken, which it would count on as well.

    Where there are to be as many training processes as there is room for, Ray Train asks an actor of its own
    for the room, and that knows machines and requests, but no placement groups.  Private, as in
    `Cluster.leave_if_drained`: Ray has no public API for this.
    """

    def __init__(self, workers: Cluster) -> None:
        import ray
        from ray.data._internal.cluster_autoscaler import base_autoscaling_coordinator as asked
        from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator as asking

        self._coordinator: Any = asking.get_or_create_autoscaling_coordinator()
        self._name = f"rlhf-{ray.get_runtime_context().get_job_id()}"
        self._request: dict[str, Any] = {
            "resources": workers.bundles(),
            "strategy": asked.ResourceRequestStrategy(workers.config.placement),
            "priority": asked.ResourceRequestPriority.HIGH,  # of equal ones the earlier has precedence
            "expire_after_s": _EXPIRES,
        }
        self._renewed = float("-inf")
        ray.get(self.renew(), timeout=workers.config.start_timeout)

    def renew(self) -> Any:
        """Say it again where it is time to: it is forgotten after a while, for commands that are killed."""
        if time.monotonic() - self._renewed < _EXPIRES / 6:
            return None
        self._renewed = time.monotonic()
        return self._coordinator.request_resources.remote(self._name, **self._request)

    def close(self) -> None:
        """The room is free again."""
        import ray

        if ray.is_initialized():
            self._coordinator.cancel_request.remote(self._name)


def _let_daemons_print(enabled: bool) -> None:
    """Whether Ray prints its daemons' messages, such as 20 lines of state when a machine dies, to our output.

    `log_to_driver=False` does not stop these, and no public setting does. They stay in Ray's logs.
    """
    from ray._private import worker

    worker._worker_logs_enabled = enabled
