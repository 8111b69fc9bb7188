"""How the trained module runs: in which precision, alone, replicated (DDP) or sharded (FSDP2, ZeRO).

Accelerate starts the group of processes, wraps the module for DDP and DeepSpeed and scales fp16 losses;
FSDP2 is torch's own `fully_shard`, which also runs on CPUs.  Whatever the wrapping, the gradient of a step is
that of the sum of all processes' losses.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from rlhf_algos.configs.trainer import HardwareConfig
from rlhf_algos.process_group import init_process_group
from rlhf_data import UserError

__all__ = ["Parallel", "check_hardware", "choose_precision"]

_LOG = logging.getLogger(__name__)
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_precision(config: HardwareConfig, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """Precision of the computation, and why.

    Args:
        config: `bf16` and `fp16`: true, false, or None to choose; and `fsdp`, which scales no fp16 loss.
        device: where the model runs.
        dtype: that the trained weights were loaded in; they are trained in fp32.

    Returns:
        "bf16", "fp16" or "no" (the weights' own precision), and the reason.

    Raises:
        UserError: fp16 is asked for on a CPU or with FSDP.
    """
    if config.fp16 and config.fsdp:
        raise UserError(
            "fp16 and fsdp do not go together; use bf16, or deepspeed in place of fsdp", code="fp16_with_fsdp"
        )
    if config.fp16 and device.type == "cpu":
        raise UserError("fp16 needs a GPU; use bf16, or leave both out for fp32", code="missing_gpu")
    for mode in ("bf16", "fp16"):
        if getattr(config, mode):
            return mode, f"{mode} is set"
    if dtype == torch.bfloat16 and config.bf16 is None:
        return "bf16", "the weights were loaded in bfloat16"
    if device.type != "cuda":
        return "no", f"fp32 on the {device.type.upper()}"
    name = torch.cuda.get_device_name(device)
    if config.bf16 is None and torch.cuda.get_device_capability(device) >= (8, 0):
        return "bf16", f"{name} has bfloat16"
    if config.fp16 is None and config.bf16 is None and not config.fsdp:
        return "fp16", f"{name} has no bfloat16"
    switched_off = config.fp16 is False or config.bf16 is False
    return "no", "bf16 or fp16 is switched off" if switched_off else f"{name} has no bfloat16, FSDP no fp16"


def check_hardware(
    config: HardwareConfig, device: torch.device, dtype: torch.dtype, *, world_size: int
) -> None:
    """Refuse settings that this machine or this number of processes cannot honour; loads nothing.

    Raises:
        UserError: fp16 where it cannot be, FSDP in a single process, or a DeepSpeed file that is missing or
            no JSON.
    """
    choose_precision(config, device, dtype)
    if config.fsdp and world_size == 1:
        raise UserError(
            "fsdp shards over several processes, this is a single one; start it with torchrun",
            code="single_process",
        )
    if config.deepspeed:
        _deepspeed_settings(config.deepspeed)


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
        self.precision, reason = choose_precision(config, device, dtype)
        self.fsdp, self.max_grad_norm = config.fsdp, max_grad_norm
        plugin = None
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it had to guess
        if config.deepspeed:
            _name_single_process()
            plugin = _deepspeed_plugin(config.deepspeed, self.precision, batch_size, max_grad_norm)
        mixed = "no" if self.fsdp or plugin else self.precision
        init_process_group()  # Accelerate alone starts no DeepSpeed group on CPUs
        AcceleratorState._reset_state()  # one trainer of this process may be in bf16, the next in fp32
        self.accelerator = Accelerator(mixed_precision=mixed, deepspeed_plugin=plugin)
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
        """Whether each process holds a part of the model or of its optimizer only."""
        return self.fsdp or self.deepspeed

    def shard(self, scorer: nn.Module, *, frozen: Iterable[nn.Parameter] = ()) -> bool:
        """Shard all parameters but `frozen` with FSDP2, in place; whether there was anything to do."""
        if not self.fsdp:
            return False
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        half = _HALF.get(self.precision)
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32) if half else None
        options: dict[str, Any] = {"mp_policy": policy} if policy else {}
        options["ignored_params"] = set(frozen)
        scorer.to(self.device)
        layers = {
            name for module in scorer.modules() for name in getattr(module, "_no_split_modules", None) or ()
        }
        for module in scorer.modules():
            if type(module).__name__ in layers:
                fully_shard(module, **options)
        fully_shard(scorer, **options)
        return True

    def prepare(self, scorer: nn.Module, optimizer: Optimizer) -> tuple[Any, Any]:
        """The module to call and the optimizer to step, wrapped as the processes need it."""
        if self.fsdp:
            self.module = scorer
        elif self.deepspeed:
            self.module, optimizer = self.accelerator.prepare(scorer, optimizer)
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

    def clip(self, parameters: Sequence[nn.Parameter]) -> Tensor | None:
        """Scale the gradient down to `max_grad_norm`; its norm before, None where DeepSpeed does it later."""
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
        """What scales fp16 losses, as JSON values; empty where nothing does, and where DeepSpeed does it."""
        scaler = self.accelerator.scaler
        return {} if scaler is None else scaler.state_dict()

    def load_scaler_state(self, state: dict[str, Any]) -> None:
        """Take up what `scaler_state` gave."""
        if state and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state)

    @property
    def loss_scale(self) -> float:
        """What fp16 multiplies the loss by."""
        scaler = self.accelerator.scaler
        return 1.0 if scaler is None else float(scaler.get_scale())

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def maximum(self, values: Tensor) -> Tensor:
        """The elementwise maximum of a tensor over all processes."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def wait(self) -> None:
        """Wait until every process has come here."""
        self.accelerator.wait_for_everyone()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which code outside the wrapped module computes in the training's precision."""
        half = _HALF.get(self.precision)
        return torch.autocast(self.device.type, dtype=half, enabled=half is not None)

    def whole_parameters(self, parameters: Sequence[nn.Parameter]) -> contextlib.AbstractContextManager[Any]:
        """Within this context parameters that DeepSpeed shards are whole; all processes must enter it."""
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=None)

    @contextlib.contextmanager
    def whole(self, scorer: nn.Module, *, everywhere: bool = False) -> Iterator[None]:
        """Within this context the module's parameters are whole, at least on the main process.

        All processes must enter it together.

        Args:
            scorer: the module.
            everywhere: make them whole on every process.
        """
        if self.deepspeed and self.module is not None:
            with self.whole_parameters(list(scorer.parameters())):
                yield
        elif self.fsdp and self.module is not None:
            from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

            options = StateDictOptions(full_state_dict=True, cpu_offload=not everywhere)
            with _replaced(scorer, get_model_state_dict(scorer, options=options)):
                yield
        else:
            yield

    def _reduced(self, values: Tensor, how: Any) -> Tensor:
        if self.world_size == 1:
            return values
        values = values.clone()
        dist.all_reduce(values, op=how)
        return values


@contextlib.contextmanager
def _replaced(module: nn.Module, state: Mapping[str, Any]) -> Iterator[None]:
    """Put a state dict's parameters in the place of the module's own for a while, if it holds any."""
    old: list[tuple[nn.Module, str, nn.Parameter]] = []
    new: dict[int, nn.Parameter] = {}  # tied parameters stay tied
    for path, owner in module.named_modules() if state else ():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            value = state[f"{path}.{name}" if path else name]
            old.append((owner, name, parameter))
            replacement = nn.Parameter(value, parameter.requires_grad)
            owner._parameters[name] = new.setdefault(id(parameter), replacement)
    try:
        yield
    finally:
        for owner, name, parameter in old:
            owner._parameters[name] = parameter


def _deepspeed_plugin(path: str, precision: str, batch_size: int, max_grad_norm: float) -> DeepSpeedPlugin:
    """Accelerate's plugin for a DeepSpeed file; what the trainer decides is filled in."""
    settings = _deepspeed_settings(path)
    ours = {
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
        "train_micro_batch_size_per_gpu": batch_size,
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
        "zero_force_ds_cpu_optimizer": False,
    }
    for key, value in ours.items():
        if settings.get(key, "auto") not in ("auto", value):
            raise UserError(
                f"deepspeed file {path}: {key} is {settings[key]!r}, the run's settings say {value!r}; "
                "leave it out"
            )
    return DeepSpeedPlugin(hf_ds_config=settings | ours)


def _name_single_process() -> None:
    """Without torchrun, tell DeepSpeed that this process is the only one; else it looks for MPI."""
    if "RANK" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _deepspeed_settings(path: str) -> dict[str, Any]:
    """What stands in a DeepSpeed file."""
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError(
            'deepspeed is not installed; run pip install "rlhf-algos[deepspeed]"', code="missing_package"
        )
    try:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"deepspeed file {path} cannot be read ({error.strerror}); a file with "
            '{"zero_optimization": {"stage": 2}} is enough for ZeRO-2',
            code="unreadable_file",
        ) from error
    except ValueError as error:
        raise UserError(
            f"deepspeed file {path} is not valid JSON ({error}); correct it", code="invalid_json"
        ) from error
    if not isinstance(settings, dict) or "zero_optimization" not in settings:
        raise UserError(
            f"deepspeed file {path} has no zero_optimization section; add one with a stage",
            code="missing_key",
            key="zero_optimization",
        )
    return settings
