"""How the trained module runs: in which precision, alone, replicated (DDP) or sharded (FSDP2, ZeRO).

Accelerate starts the group of processes, wraps the module for DDP and DeepSpeed and scales fp16 losses;
FSDP2 is torch's own `fully_shard`, which also runs on CPUs.  Whatever the wrapping, the gradient of a step is
that of the sum of all processes' losses.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.optim import Optimizer
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from rlhf_algos.configs.trainer import HardwareConfig
from rlhf_algos.parallel.activation_offloading import offloaded_states
from rlhf_algos.parallel.deepspeed_file import (
    SHARDED_WEIGHTS,
    deepspeed_plugin,
    name_single_process,
    zero_stage,
)
from rlhf_algos.parallel.precision import HALF, check_hardware, choose_precision
from rlhf_algos.parallel.sharding import partition, reshard, shard, step_in_place
from rlhf_algos.process_group import init_process_group
from rlhf_models import (
    causal_lm,
    gathering,
    is_adapted,
    is_deferred,
    is_sharded,
    is_sharded_alone,
    make_deterministic,
    use_partitioned_linears,
    whole_value,
)

_LOG = logging.getLogger(__name__)


class Parallel:
    """The processes of a training run and the module they train.

    Args:
        config: precision and kind of parallelism.
        device: where the model is; with several processes it moves to the process's own device.
        dtype: that the trained weights were loaded in.
        batch_size: examples per process and step, for DeepSpeed's book-keeping.
        max_grad_norm: 2-norm the gradient is scaled down to.

    Raises:
        UserError: settings that do not go together, or a DeepSpeed file that cannot be read.
    """

    def __init__(
        self,
        config: HardwareConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        batch_size: int = 1,
        max_grad_norm: float = 1.0,
    ) -> None:
        if config.full_determinism:
            make_deterministic()
        self.precision, reason = choose_precision(config, device, dtype)
        self.fsdp, self.max_grad_norm = config.fsdp, max_grad_norm
        self._offload, self._offloads_states = config.fsdp_cpu_offload, config.activation_offloading
        self.zero_stage = zero_stage(config.deepspeed) if config.deepspeed else 0
        plugin = None
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it had to guess
        if config.deepspeed:
            name_single_process()
            plugin = deepspeed_plugin(config.deepspeed, self.precision, batch_size, max_grad_norm)
        mixed = "no" if self.fsdp or plugin else self.precision
        init_process_group()  # Accelerate alone starts no DeepSpeed group on CPUs
        AcceleratorState._reset_state()  # one trainer of this process may be in bf16, the next in fp32
        # Buffers are equal in all processes; a broadcast in every forward pass would make a process wait for
        # one that makes fewer passes, as in evaluation.
        unsent = DistributedDataParallelKwargs(broadcast_buffers=False)
        self.accelerator = Accelerator(
            mixed_precision=mixed, deepspeed_plugin=plugin, kwargs_handlers=[unsent]
        )
        unset_hf_deepspeed_config()  # else transformers would shard every model that it loads from now on
        self.deepspeed = plugin is not None
        check_hardware(config, device, dtype, world_size=self.world_size)
        self.device = self.accelerator.device if self.world_size > 1 or self.deepspeed else device
        self.module: Any = None
        _LOG.info("precision %s: %s", self.precision if self.precision != "no" else "as loaded", reason)

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        return self.accelerator.process_index

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.accelerator.num_processes

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.accelerator.is_main_process

    @property
    def sharded(self) -> bool:
        """Whether the model or its optimizer is sharded over processes."""
        return self.fsdp or self.deepspeed

    @property
    def shards_weights(self) -> bool:
        """Whether the weights are sharded over processes."""
        return self.fsdp or self.zero_stage == SHARDED_WEIGHTS

    def shard(self, scorer: nn.Module, *, frozen: Iterable[nn.Parameter] = ()) -> bool:
        """Shard all parameters but `frozen`, in place, where the weights are sharded; whether they are now.

        DeepSpeed does so itself when it prepares the module, but for deferred parameters.
        """
        half = HALF.get(self.precision)
        if self.fsdp:
            shard(scorer, self.device, half=half, offload=self._offload, frozen=frozen)
        elif self.zero_stage == SHARDED_WEIGHTS and is_deferred(scorer):
            for parameter in scorer.parameters():
                if half is not None and parameter.is_floating_point():
                    parameter.data = parameter.data.to(half)  # DeepSpeed keeps a copy in fp32
            settings: Any = self.accelerator.state.deepspeed_plugin
            partition(scorer, self.device, settings.deepspeed_config, storage=half or torch.float32)
        else:
            return False
        return True

    def prepare(self, scorer: nn.Module, optimizer: Optimizer) -> tuple[Any, Any]:
        """The module to call and the optimizer to step, wrapped as the processes need it."""
        if self.fsdp:
            self.module = scorer
        elif self.deepspeed:
            self.module, optimizer = self.accelerator.prepare(scorer, optimizer)
            if self.zero_stage == SHARDED_WEIGHTS:
                step_in_place(self.module.optimizer)
                use_partitioned_linears(scorer)
        else:
            placement = [self.world_size > 1, self.precision == "fp16"]
            self.module, optimizer = self.accelerator.prepare(scorer, optimizer, device_placement=placement)
        return self.module, optimizer

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a micro-batch's share of the step's loss.

        Args:
            loss: this process's share; the shares of all processes add up to the step's loss.
            last: whether it is this process's last micro-batch of the step: then gradients are summed.
        """
        loss = loss * self.world_size  # wrapped modules average over the processes
        if self.deepspeed:
            self.module.set_gradient_accumulation_boundary(last)
            self.module.backward(loss)
            if not last:
                self.module.step()
            return
        self.accelerator.backward(loss)

    def accumulating(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Context of the forward and backward pass of a micro-batch."""
        if self.fsdp:
            self.module.set_requires_gradient_sync(last)
        ddp = self.world_size > 1 and not self.sharded
        return self.accelerator.no_sync(self.module) if ddp and not last else contextlib.nullcontext()

    def offloading(self) -> contextlib.AbstractContextManager[Any]:
        """Context of the wrapped module's forward pass, which may keep hidden states in main memory."""
        return offloaded_states(self.device) if self._offloads_states else contextlib.nullcontext()

    def clip(self, parameters: Sequence[nn.Parameter]) -> Tensor | None:
        """Scale the gradient down to `max_grad_norm`; its norm before, None if DeepSpeed does it later."""
        if self.deepspeed:
            return None
        self.accelerator.unscale_gradients()
        norm: Any = torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def step(self, optimizer: Any) -> tuple[bool, Tensor | None]:
        """One optimizer step: whether it was taken (fp16 skips one that overflowed), and DeepSpeed's norm."""
        if self.deepspeed:
            self.module.step()
            norm = self.module.get_global_grad_norm()
            return True, None if norm is None else torch.as_tensor(norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return not getattr(optimizer, "step_was_skipped", False), None

    def scaler_state(self) -> dict[str, Any]:
        """State of the fp16 loss scaler as JSON values; empty without one, and where DeepSpeed scales."""
        scaler = self.accelerator.scaler
        return {} if scaler is None else scaler.state_dict()

    def load_scaler_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `scaler_state` returned."""
        if state and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state)

    @property
    def loss_scale(self) -> float:
        """The fp16 loss scale."""
        scaler = self.accelerator.scaler
        return 1.0 if scaler is None else float(scaler.get_scale())

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def maximum(self, values: Tensor) -> Tensor:
        """The elementwise maximum of a tensor over all processes."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def wait(self) -> None:
        """Wait until every process is here."""
        self.accelerator.wait_for_everyone()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which code outside the wrapped module computes in the training's precision."""
        half = HALF.get(self.precision)
        return torch.autocast(self.device.type, dtype=half, enabled=half is not None)

    def whole_parameters(self, parameters: Sequence[nn.Parameter]) -> contextlib.AbstractContextManager[Any]:
        """Within this context parameters that DeepSpeed shards are whole; all processes must enter it."""
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=None)

    @contextlib.contextmanager
    def gathering(self, module: nn.Module) -> Iterator[bool]:
        """Within this context the main process can read parameters that are sharded, whole, one at a time.

        `rlhf_models.loading.shards.whole_value` gives them.  Of a module with adapters the trained parameters
        are in place, whole.  Weights that DeepSpeed trains in half precision come from its copy in fp32.  The
        other processes take part until the main process leaves the context, and only then come into it; all
        processes must enter it together.

        Yields:
            Whether this is the main process.
        """
        if not self.shards_weights:
            with self._fp32_in_place(module):
                yield self.is_main
            return
        reshard(self.module)
        parameters = list(module.parameters())
        if not self.is_main:
            while (number := self._told(-1)) >= 0:
                self._whole_fp32(parameters[number])
            yield False
            return
        numbers = {id(parameter): number for number, parameter in enumerate(parameters)}

        def gather(parameter: Tensor) -> Tensor:
            return self._whole_fp32(parameters[self._told(numbers[id(parameter)])])

        try:
            with gathering(gather), _adapters_whole(module):
                yield True
        finally:
            self._told(-1)

    def whole_values(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The module's parameters by name, whole on every process, one at a time; all must take all."""
        if self.shards_weights:
            reshard(self.module)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            yield name, self._whole(parameter) if is_sharded(parameter) else parameter.detach()

    @torch.no_grad()
    def whole_head(self, model: Any) -> Callable[[Tensor], Tensor] | None:
        """The output layer of a language model with whole weights, where it is sharded by itself.

        Such a layer is gathered at each call, of which processes that sample make different numbers.
        """
        head: Any = causal_lm(model).get_output_embeddings()
        if not is_sharded_alone(head):
            return None
        bias = None if head.bias is None else self._whole(head.bias)
        return partial(linear, weight=self._whole(head.weight), bias=bias)

    def _whole(self, parameter: Any) -> Tensor:
        """A sharded parameter whole, on every process."""
        if not hasattr(parameter, "ds_id"):
            return parameter.detach().to(self.device).full_tensor()
        with self.whole_parameters([parameter]):
            return parameter.detach().clone()

    def _whole_fp32(self, parameter: Any) -> Tensor:
        """The same, of a weight that DeepSpeed trains in half precision its copy in fp32."""
        if not _has_fp32_copy(parameter):
            return self._whole(parameter)
        from deepspeed.utils import safe_get_full_fp32_param

        value: Any = safe_get_full_fp32_param(parameter)
        return value.detach()

    @contextlib.contextmanager
    def _fp32_in_place(self, module: nn.Module) -> Iterator[None]:
        """Context in which the main process's weights are DeepSpeed's fp32 copies."""
        halves: list[tuple[nn.Parameter, Tensor]] = []
        for parameter in filter(_has_fp32_copy, module.parameters()):
            value = self._whole_fp32(parameter)
            if self.is_main:
                halves.append((parameter, parameter.data))
                parameter.data = value.cpu()
        try:
            yield
        finally:
            for parameter, half in halves:
                parameter.data = half

    def _told(self, number: int) -> int:
        """The main process's number, on every process."""
        value = torch.tensor([number], device=self.device)
        dist.broadcast(value, 0)
        return int(value)

    def _reduced(self, values: Tensor, how: Any) -> Tensor:
        if self.world_size == 1:
            return values
        values = values.clone()
        dist.all_reduce(values, op=how)
        return values


def _has_fp32_copy(parameter: Any) -> bool:
    """Whether DeepSpeed steps a copy of a parameter in fp32, and not the parameter."""
    stepped = hasattr(parameter, "_z3_optimizer" if hasattr(parameter, "ds_id") else "_hp_mapping")
    return stepped and parameter.requires_grad and parameter.dtype in HALF.values()


@contextlib.contextmanager
def _adapters_whole(module: nn.Module) -> Iterator[None]:
    """Context in which the trained parameters of a module with adapters are whole, in place."""
    if not any(is_adapted(each) for each in module.modules()):
        yield
        return
    old: list[tuple[nn.Module, str, nn.Parameter]] = []
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter.requires_grad:
                old.append((owner, name, parameter))
                owner._parameters[name] = nn.Parameter(whole_value(parameter))
    try:
        yield
    finally:
        for owner, name, parameter in old:
            owner._parameters[name] = parameter
