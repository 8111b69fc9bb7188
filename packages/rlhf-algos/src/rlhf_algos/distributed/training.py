"""Training processes on a Ray cluster: Ray Train starts them, as torchrun would, and again after a loss."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from rlhf_algos.distributed.cluster import Cluster, TakenRoom, TrainerCluster
from rlhf_algos.distributed.config import ClusterConfig, DistributedConfig
from rlhf_algos.distributed.trainer import BEGUN, PRINTED, SIGNAL, Ended, attempt
from rlhf_algos.engine.signals import GracefulStop
from rlhf_data import UserError, atomic_write_text

FOLDER = ".trainers"
"""Folder in that of a run, while it is trained on a cluster: what processes tell, and Ray Train's state."""
_EVERY = 0.2
"""Seconds between looks at what the training processes print."""
_ROOM_KNOWN = 30.0
"""Seconds after which Ray Train has room for as many processes as it counted, or a machine that it counted is
lost: it looks for machines every 20 seconds, and counts again."""
_GRACE = 1.0
"""Seconds for the others to end after a user's mistake showed in one."""


def run_trainers(config: ClusterConfig, run: Path, work: Callable[[bool], None]) -> None:
    """Do some work in training processes on a cluster, as under torchrun; what the first prints is printed.

    The first SIGTERM or Ctrl-C is passed on, so that they write a checkpoint; a second one acts at once.

    Args:
        config: the cluster, and how many processes.
        run: the run's folder, on storage that all of them see.
        work: called in each with whether an earlier attempt, a process of which was lost, is continued.  It
            is sent to them: a function of a module, perhaps with arguments by `functools.partial`.

    Raises:
        UserError: the one that the work raised, or Ray is missing, the cluster has no room, or too many
            processes were lost.
        KeyboardInterrupt: the work ended after a signal; its `exit_code` is that of the work.
    """
    folder = run.resolve() / FOLDER
    shutil.rmtree(folder, ignore_errors=True)  # of a command that was killed
    try:
        folder.mkdir(parents=True)
        with contextlib.ExitStack() as stack:
            cluster = stack.enter_context(contextlib.closing(TrainerCluster(config)))
            if cluster.local:
                _check_python(sys.executable)
            room = None
            if isinstance(config, DistributedConfig) and config.rollout_workers:
                workers = stack.enter_context(contextlib.closing(Cluster(config, for_trainers=True)))
                if config.min_trainer_workers:
                    room = stack.enter_context(contextlib.closing(TakenRoom(workers)))
            cluster.release()
            _follow(_Fit(config, cluster.resources(), folder, work), folder, room)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_python(path: str) -> None:
    """Refuse a Python that Ray Train cannot start: Ray writes its path into a shell's command as it is.

    Raises:
        UserError: a blank in the path would end it.
    """
    if any(character.isspace() for character in path):
        raise UserError(
            f"Ray Train cannot start processes with {path}, because its path has a blank; make the "
            "environment in a folder without one",
            code="unusable_python",
        )


class _Fit(threading.Thread):
    """Ray Train's own loop, in a thread: in the main one it would take over Ctrl-C."""

    def __init__(
        self, config: ClusterConfig, resources: dict[str, float], folder: Path, work: Callable[[bool], None]
    ) -> None:
        super().__init__(daemon=True)
        self._config, self._resources, self._folder, self._work = config, resources, folder, work
        self.error: BaseException | None = None

    def run(self) -> None:
        """Train until all processes have ended, or too many were lost."""
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        from rlhf_algos.distributed.meeting import Launch

        config = self._config
        least, most = config.min_trainer_workers, config.trainer_workers
        wait = config.start_timeout if least is None else min(config.start_timeout, _ROOM_KNOWN)
        os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(wait)
        failures = config.max_trainer_failures
        # A machine's loss costs one count that was wrong; others may take what was counted, for a while.
        counts = 0 if least is None else failures + math.ceil(config.start_timeout / wait)
        try:
            TorchTrainer(
                attempt,
                train_loop_config={"folder": str(self._folder), "work": self._work},
                torch_config=Launch(gpus=bool(config.gpus_per_trainer)),
                scaling_config=ScalingConfig(
                    num_workers=most if least is None else (least, most),
                    use_gpu=bool(config.gpus_per_trainer),
                    resources_per_worker=self._resources,
                    placement_strategy=config.placement,
                ),
                run_config=RunConfig(
                    name="state",
                    storage_path=str(self._folder),
                    failure_config=FailureConfig(failures, controller_failure_limit=counts),
                    worker_runtime_env=config.runtime_env,
                ),
            ).fit()
        except BaseException as error:  # the main thread says what became of it
            self.error = error


def _follow(fit: _Fit, folder: Path, room: TakenRoom | None) -> None:
    """Print what the first process prints, pass signals on, and raise what ended the work."""
    fit.start()
    printed = _Printed(folder / PRINTED)
    with GracefulStop("stopping the training processes; once more stops at once") as stop:
        while fit.is_alive():
            fit.join(_EVERY)
            if room:
                room.renew()
            printed.forward()
            if (ended := Ended.read(folder)) and ended.exit_code is None:
                fit.join(_GRACE)  # the first process's sentence is preferred
                break
            if stop.signal and not (folder / BEGUN).exists():
                Ended(exit_code=stop.exit_code).again()
            if stop.signal and not (folder / SIGNAL).exists():
                atomic_write_text(folder / SIGNAL, str(int(stop.signal)))
    printed.forward()
    if ended := Ended.read(folder):
        ended.again()
    if fit.error is not None:
        raise _failure(fit.error, begun=(folder / BEGUN).exists()) from fit.error


class _Printed:
    """A file that grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def forward(self) -> None:
        """Print what is new."""
        if not self._path.exists():
            return
        with self._path.open(encoding="utf-8", errors="replace", newline="") as file:
            file.seek(self._at)
            sys.stdout.write(file.read())
            sys.stdout.flush()
            self._at = file.tell()


def _reason(error: BaseException, failures: Mapping[int, BaseException]) -> str:
    """Why it gave up: a process that died, which the others' errors only follow from, or an error."""
    dead = [rank for rank, failure in sorted(failures.items()) if "process has died" in str(failure)]
    if dead:
        return (
            f"training process {dead[0]} died without an error: it was killed, had no memory left, or ended "
            "itself, perhaps in a reward function"
        )
    lines = [line for line in str(next(iter(failures.values()), error)).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _failure(error: BaseException, *, begun: bool) -> UserError:
    """The error where Ray Train gave up."""
    failures: dict[int, BaseException] = getattr(error, "worker_failures", {})
    for failure in failures.values():
        if isinstance(failure, UserError):
            return failure
    if type(getattr(error, "controller_failure", None)).__name__ == "WorkerGroupStartupTimeoutError":
        return UserError(
            "the Ray cluster has had no room for the training processes for distributed.start_timeout; add "
            "machines, end what else runs there, or lower trainer_workers or min_trainer_workers",
            code="no_room_in_cluster",
        )
    said = _reason(error, failures)
    if not begun:
        return UserError(
            f"the training processes did not start: {said}; Ray's logs say more", code="not_started"
        )
    return UserError(
        f"training processes were lost more often than distributed.max_trainer_failures allows, at last: "
        f"{said}; Ray's logs say more",
        code="too_many_losses",
    )
