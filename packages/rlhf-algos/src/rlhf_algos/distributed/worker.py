"""Workers: an engine around a copy of the policy, which takes up the weights that it is asked for."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from rlhf_algos.distributed.cluster import Cluster
from rlhf_algos.distributed.weights import Arrays
from rlhf_data import UserError
from rlhf_infer import (
    GenerationEngine,
    Rollout,
    SamplingParams,
    TransformersEngine,
    VLLMEngine,
    VLLMSettings,
    write_weight_folder,
)
from rlhf_models import AdapterSet

_PULL = 60.0
"""Seconds that the weights actor may take to say where weights are."""


@dataclass(frozen=True)
class EngineSetup:
    """How a worker makes its engine.

    Args:
        max_batch_tokens: of the transformers engine.
        threads: that the trainer computes with on a CPU; a worker takes no more.
        half: the dtype of autocast, as text; None computes in the weights' own.
        vllm: settings of vLLM, which is then the engine.
        timeout: seconds without an answer after which vLLM counts as lost.
    """

    max_batch_tokens: int
    threads: int
    half: str | None = None
    vllm: VLLMSettings | None = None
    timeout: float = 600.0


@dataclass(frozen=True)
class WorkerRole:
    """A model that workers sample from; several roles may be adapters of one.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        adapter: the adapter that the role is; None is the model as it stands.
        trained: names of the parameters that change; None: all that require gradients.
    """

    model: nn.Module
    tokenizer: Any
    adapter: str | None = None
    trained: frozenset[str] | None = None

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that change, by name."""
        return {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if (parameter.requires_grad if self.trained is None else name in self.trained)
        }


@dataclass(frozen=True)
class Request:
    """What a worker is asked for: the arguments of `GenerationEngine.generate`, the weights, and as whom."""

    prompts: list[list[int]]
    n: int
    params: SamplingParams
    first: int
    weights: str
    role: str = ""


@dataclass(frozen=True)
class Failure:
    """Why a worker that is well gave no completions.

    Args:
        kind: `weights`: they could not be fetched; `input`: a mistake of the user's, whose sentence it is;
            `error`: anything else.
        text: what happened.
        code: of a user's mistake.
        fields: of a user's mistake.
    """

    kind: Literal["weights", "input", "error"]
    text: str
    code: str = ""
    fields: dict[str, Any] | None = None


class RolloutWorker:
    """Samples completions; nothing of it is worth keeping, so another one can take its place at any time."""

    def __init__(self, cpus: int) -> None:
        self._cpus = cpus
        self._roles: dict[str, WorkerRole] = {}
        self._weights: dict[str, str] = {}
        self._engines: dict[str, GenerationEngine] = {}
        self._adapters: dict[str, AdapterSet] = {}
        self._half: torch.dtype | None = None

    def setup(self, start: list[Any], weights: Any) -> int | Failure:
        """Make the engine; the process's number.

        Args:
            start: a list with the reference of the roles, whose models lack their trained weights, and the
                `EngineSetup`.
            weights: the weights actor, whose newest weights the engines begin with.
        """
        try:
            return self._set_up(start, weights)
        except UserError as error:
            return Failure("input", str(error), error.code, error.fields)

    def _set_up(self, start: list[Any], weights: Any) -> int | Failure:
        import ray

        roles, setup = ray.get(start[0])
        torch.set_num_threads(min(self._cpus, setup.threads))
        device = torch.device("cuda" if ray.get_gpu_ids() else "cpu")
        self._roles = with_room(roles, device)
        self._half = getattr(torch, setup.half) if setup.half else None
        for name, role in self._roles.items():
            model: Any = role.model
            if failure := self._take_up(name, "", weights):
                return failure
            if role.adapter is not None:
                self._adapters[name] = AdapterSet(model)
            if setup.vllm is None:
                held = setup.max_batch_tokens
                self._engines[name] = TransformersEngine(model, role.tokenizer, max_batch_tokens=held)
                continue
            with tempfile.TemporaryDirectory(prefix="rlhf-worker-") as folder:
                write_weight_folder(model, folder, tokenizer=role.tokenizer)
                engine = VLLMEngine(folder, role.tokenizer, setup.vllm, timeout_s=setup.timeout)
                self._engines[name] = engine
        return os.getpid()

    def generate(self, request: Request, weights: Any) -> list[list[Rollout]] | Failure:
        """Completions of each prompt of a request."""
        try:
            if failure := self._take_up(request.role, request.weights, weights):
                return failure
            engine, adapters = self._engines[request.role], self._adapters.get(request.role)
            device = next(self._roles[request.role].model.parameters()).device.type
            with (
                adapters.use(self._roles[request.role].adapter) if adapters else contextlib.nullcontext(),
                torch.autocast(device, self._half, enabled=self._half is not None),
            ):
                return engine.generate(request.prompts, request.n, request.params, first=request.first)
        except UserError as error:
            return Failure("input", str(error), error.code, error.fields)
        except Exception:  # the controller logs it, and gives the batch a limited number of retries
            return Failure("error", traceback.format_exc(limit=-3))

    def _take_up(self, name: str, digest: str, weights: Any) -> Failure | None:
        """Fetch weights of a role, if they are not those that are here; without a digest the newest."""
        import ray
        from ray import exceptions

        if digest and digest == self._weights.get(name):
            return None
        try:
            digest, (reference,) = ray.get(weights.pull.remote(name, digest), timeout=_PULL)
            arrays: Any = ray.get(reference)
        except (exceptions.RayError, KeyError) as error:
            return Failure("weights", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        self._weights.pop(name, None)  # a kill in between leaves nothing that is half of each
        load_arrays(self._roles[name], arrays)
        engine = self._engines.get(name)
        if engine is not None and not isinstance(engine, TransformersEngine):
            engine.update_weights(self._roles[name].model)
        self._weights[name] = digest
        return None


@dataclass
class Worker:
    """A worker as the controller sees it.

    Attributes:
        number: its place; a replacement takes over the number.
        actor: the actor.
        ready: whether its engine is there.
        doing: the reference of what it was asked last; None while it idles.
        task: what that is for; None for its setup.
        weights: the weights actor that it was told of for that.
        deadline: when that must be there, in seconds of the monotonic clock.
    """

    number: int
    actor: Any
    ready: bool = False
    doing: Any = None
    task: Any = None
    weights: Any = None
    deadline: float = 0.0


@dataclass(frozen=True)
class Lost:
    """A worker that is gone: why, and whether it never came up in time."""

    why: str
    never_up: bool = False


class Pool:
    """The workers: starts them, asks them, and says what came of it.

    Args:
        cluster: where they run.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._config = cluster, cluster.config
        self._setup: tuple[Any, ...] = ()
        self.workers: dict[int, Worker] = {}
        for number in range(self._config.rollout_workers):
            self._start(number)

    def set_up(self, *arguments: Any) -> None:
        """Let workers make their engines, also later ones; the arguments are those of the actor's `setup`."""
        self._setup = arguments
        for worker in self.workers.values():
            if not worker.ready and worker.doing is None:
                worker.weights = arguments[-1]
                self._ask(worker, worker.actor.setup.remote(*arguments), self._config.start_timeout)

    @property
    def busy(self) -> bool:
        """Whether a worker does something."""
        return any(worker.doing is not None for worker in self.workers.values())

    def idle(self) -> list[Worker]:
        """Workers that can be given something."""
        return [worker for worker in self.workers.values() if worker.ready and worker.doing is None]

    def give(self, worker: Worker, task: Any, request: Request, weights: Any) -> None:
        """Have a worker sample a request, which is for a task."""
        worker.task, worker.weights = task, weights
        self._ask(worker, worker.actor.generate.remote(request, weights), self._config.group_timeout)

    def answers(self, patience: float) -> list[tuple[Worker, Any]]:
        """What workers have answered, after waiting for it: completions, a `Failure`, or that one is `Lost`.

        What a worker does is over then; a lost one is out of the pool.

        Args:
            patience: seconds after which nothing is an answer too.
        """
        import ray

        asked = {worker.doing: worker for worker in self.workers.values() if worker.doing is not None}
        if not asked:
            return []
        until = min(worker.deadline for worker in asked.values()) - time.monotonic()
        done, _ = ray.wait(list(asked), num_returns=1, timeout=max(0.0, min(patience, until)))
        found = [(asked[reference], _outcome(reference)) for reference in done]
        if not done:
            late = [worker for worker in asked.values() if worker.deadline <= time.monotonic()]
            found = [(worker, self._hung(worker)) for worker in late]
        for worker, outcome in found:
            worker.doing = None
            if isinstance(outcome, Lost):
                self._end(self.workers.pop(worker.number))
            elif not isinstance(outcome, Failure):
                worker.ready = True
        return found

    def replace(self, number: int) -> None:
        """Start a worker in the place of a lost one."""
        self._start(number)
        if self._setup:
            self.set_up(*self._setup)

    def close(self) -> None:
        """End all workers."""
        for worker in self.workers.values():
            self._end(worker)
        self.workers.clear()

    def _start(self, number: int) -> None:
        import ray

        options: Any = self._cluster.options(number)
        actor = ray.remote(RolloutWorker).options(**options, max_restarts=0)
        self.workers[number] = Worker(number, actor.remote(self._config.cpus_per_worker))

    def _ask(self, worker: Worker, reference: Any, seconds: float) -> None:
        worker.doing, worker.deadline = reference, time.monotonic() + seconds

    def _hung(self, worker: Worker) -> Lost:
        if worker.ready:
            return Lost(f"no answer within group_timeout, {self._config.group_timeout:g} s")
        return Lost(f"not there within start_timeout, {self._config.start_timeout:g} s", never_up=True)

    def _end(self, worker: Worker) -> None:
        import ray
        from ray import exceptions

        if ray.is_initialized():
            with contextlib.suppress(exceptions.RayError):  # it has ended by itself
                ray.kill(worker.actor, no_restart=True)


def _outcome(reference: Any) -> Any:
    """What an actor returned; that it is lost, where Ray says so."""
    import ray
    from ray import exceptions

    try:
        return ray.get(reference)
    except exceptions.RayTaskError as error:  # outside of what a worker catches itself
        return Failure("error", str(error)[-2000:])
    except exceptions.RayError as error:
        return Lost(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def trained_arrays(role: WorkerRole) -> Arrays:
    """The bytes of a role's trained parameters, without a copy where they are on the CPU."""
    return {
        name: parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        for name, parameter in role.parameters().items()
    }


def digest_of(arrays: Arrays) -> str:
    """What weights are known by: equal for equal bits."""
    digest = hashlib.blake2b(digest_size=16)
    for name, array in arrays.items():
        digest.update(f"{name} {array.size} ".encode())
        digest.update(array.data)
    return digest.hexdigest()


def skeleton(roles: Mapping[str, WorkerRole]) -> dict[str, WorkerRole]:
    """Roles without the values of their trained parameters; frozen ones are shared with them, on the CPU."""
    changes = {id(parameter) for role in roles.values() for parameter in role.parameters().values()}
    memo: dict[int, Any] = {}
    for role in roles.values():
        for tensor in (*role.model.parameters(), *role.model.buffers()):
            kept = tensor.detach().to("meta" if id(tensor) in changes else "cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = (
                nn.Parameter(kept, requires_grad=tensor.requires_grad) if is_parameter else kept
            )
    return copy.deepcopy(dict(roles), memo)


def with_room(roles: Mapping[str, WorkerRole], device: torch.device) -> dict[str, WorkerRole]:
    """Skeletons on a device, with memory for their trained parameters, for evaluation."""
    made: dict[int, nn.Parameter] = {}
    for role in roles.values():
        for module in role.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    empty = torch.empty_like(parameter, device=device)
                    made.setdefault(id(parameter), nn.Parameter(empty, requires_grad=parameter.requires_grad))
                    module._parameters[name] = made[id(parameter)]
        role.model.to(device).eval()
    return dict(roles)


def load_arrays(role: WorkerRole, arrays: Arrays) -> None:
    """Put trained weights into a role.

    Raises:
        ValueError: the parameters are not those of the arrays.
    """
    parameters = role.parameters()
    if parameters.keys() != arrays.keys():
        raise ValueError("the weights are those of another model")
    for name, array in arrays.items():
        target = parameters[name].detach().view(-1).view(torch.uint8)
        if target.device.type == "cpu":
            target.numpy()[...] = array
        else:
            target.copy_(torch.tensor(array))
