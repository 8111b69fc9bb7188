"""Workers: an engine around a copy of the policy, which takes up the weights that it is asked for."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_algos.distributed.ledger import GroupKey
from rlhf_algos.distributed.pool import Failure, in_short
from rlhf_algos.distributed.scoring import Scoring
from rlhf_algos.distributed.weights import Arrays
from rlhf_data import PromptExample, UserError
from rlhf_infer import (
    GenerationEngine,
    Rollout,
    SamplingParams,
    TransformersEngine,
    VLLMEngine,
    VLLMSettings,
    write_weight_folder,
)
from rlhf_models import AdapterSet, forget_deferred, whole_value

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
        frame: of a model that is sharded, a copy from before that, without values; see `frame_of`.
    """

    model: nn.Module
    tokenizer: Any
    adapter: str | None = None
    trained: frozenset[str] | None = None
    frame: nn.Module | None = None

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that change, by name."""
        return {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if (parameter.requires_grad if self.trained is None else name in self.trained)
        }


@dataclass(frozen=True)
class Request:
    """A request to a worker: arguments of `GenerationEngine.generate`, weights and role."""

    prompts: list[list[int]]
    n: int
    params: SamplingParams
    first: int
    weights: str
    role: str = ""


@dataclass(order=True)
class Task:
    """A batch of prompts that one worker samples; the order is that in which they are handed out.

    Args:
        step: the step that it is for, or -1, which comes before all else.
        number: its place among those of the step.
        request: what is asked.
        key: what the ledger knows it by; None keeps it out of the ledger.
        groups: the completions of each prompt, once they are there.
        failures: how often sampling it ended with an error.
        known: whether the ledger had it.
        prompts: what its completions are scored with; without them they are not.
        columns: the columns that reward functions see.
        scoring: their scoring, once there is something to score.
    """

    step: int
    number: int
    request: Request = field(compare=False)
    key: GroupKey | None = field(compare=False, default=None)
    groups: list[list[Rollout]] | None = field(compare=False, default=None)
    failures: int = field(compare=False, default=0)
    known: bool = field(compare=False, default=False)
    prompts: Sequence[PromptExample] = field(compare=False, default=())
    columns: Sequence[str] = field(compare=False, default=())
    scoring: Scoring | None = field(compare=False, default=None)

    @property
    def sampled(self) -> bool:
        """Whether its completions are there."""
        return self.groups is not None

    @property
    def done(self) -> bool:
        """Whether it needs no worker any more."""
        return self.sampled and (not self.prompts or (self.scoring is not None and self.scoring.done))


class RolloutWorker:
    """Samples completions; it has no state of its own, so a new worker can replace it at any time."""

    def __init__(self, cpus: int) -> None:
        self._cpus = cpus
        self._roles: dict[str, WorkerRole] = {}
        self._weights: dict[str, str] = {}
        self._engines: dict[str, GenerationEngine] = {}
        self._adapters: dict[str, AdapterSet] = {}
        self._half: torch.dtype | None = None

    def setup(self, start: list[Any], weights: Any) -> tuple[int, None] | Failure:
        """Make the engine; the process's number, and nothing to be known of the engine.

        Args:
            start: a list with the reference of the roles, whose models lack their trained weights, and the
                `EngineSetup`.
            weights: the weights actor, whose newest weights the engines begin with.
        """
        try:
            return self._set_up(start, weights)
        except UserError as error:
            return Failure("input", str(error), error.code, error.fields)

    def _set_up(self, start: list[Any], weights: Any) -> tuple[int, None] | Failure:
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
        return os.getpid(), None

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
            return Failure("weights", in_short(error))
        self._weights.pop(name, None)  # a kill in between leaves nothing that is half of each
        load_arrays(self._roles[name], arrays)
        engine = self._engines.get(name)
        if engine is not None and not isinstance(engine, TransformersEngine):
            engine.update_weights(self._roles[name].model)
        self._weights[name] = digest
        return None


def trained_arrays(role: WorkerRole) -> Arrays:
    """The bytes of a role's trained parameters, without a copy where they are on the CPU and whole."""
    dtypes = {name: kept.dtype for name, kept in (role.frame or role.model).named_parameters()}
    return {
        name: _bytes_of(whole_value(parameter).to("cpu", dtypes[name]))
        for name, parameter in role.parameters().items()
    }


def _bytes_of(values: Tensor) -> Any:
    return values.contiguous().view(-1).view(torch.uint8).numpy()


def digest_of(arrays: Arrays) -> str:
    """Digest that identifies weights: equal for equal bits."""
    digest = hashlib.blake2b(digest_size=16)
    for name, array in arrays.items():
        digest.update(f"{name} {array.size} ".encode())
        digest.update(array.data)
    return digest.hexdigest()


def frame_of(model: nn.Module) -> nn.Module:
    """A copy of a model without values, deferred or not."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        bare = tensor.detach().to("meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(bare, requires_grad=tensor.requires_grad) if is_parameter else bare
    frame = copy.deepcopy(model, memo)
    forget_deferred(frame)
    return frame


def skeleton(roles: Mapping[str, WorkerRole]) -> dict[str, WorkerRole]:
    """Roles without the values of their trained parameters; frozen ones are shared with them, on the CPU."""
    if any(role.frame for role in roles.values()):
        return {name: _filled(role) for name, role in roles.items()}
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


def _filled(role: WorkerRole) -> WorkerRole:
    """A role whose model is the frame, with the values of what is not trained."""
    assert role.frame is not None
    trained = role.parameters()
    for (name, parameter), (_, bare) in zip(_tensors(role.model), _tensors(role.frame), strict=True):
        if name not in trained:
            owner, _, attribute = name.rpartition(".")
            value = whole_value(parameter).to("cpu", bare.dtype)
            kept = nn.Parameter(value, requires_grad=False) if isinstance(bare, nn.Parameter) else value
            setattr(role.frame.get_submodule(owner), attribute, kept)
    return WorkerRole(role.frame, role.tokenizer, role.adapter, frozenset(trained))


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


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
