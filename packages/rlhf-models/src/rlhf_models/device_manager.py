"""Devices and precisions of models."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_data import UserError

ROLES = ("policy", "monitor", "reward", "judge")
_GPU_OF_ROLE = {"policy": 0, "monitor": 0, "reward": 1, "judge": 2}
_BF16_CAPABILITY = (8, 0)
"""Compute capability from which tensor cores take bfloat16 (NVIDIA Ampere)."""


def make_deterministic() -> None:
    """Have this process use CUDA kernels that give the same bits every time; on CPUs they do anyway.

    Without it sums are added up in whatever order threads finish, so that two runs differ by rounding. It
    has to come before the first matrix product, because cuBLAS reads its setting then.
    """
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


@dataclass(frozen=True)
class Placement:
    """Device of one role.

    Args:
        role: name of the role.
        device: its device.
        dtype: dtype for its weights and autocast.
        reason: why, as text.
    """

    role: str
    device: torch.device
    dtype: torch.dtype
    reason: str


class DeviceManager:
    """Assigns roles to devices.

    Policy and monitor train on the first GPU, the reward model and the judge take the next ones, and share
    the last if there are fewer; without a GPU everything runs on the CPU. Weights are bfloat16 on GPUs
    that compute in it, float32 elsewhere.

    Args:
        overrides: role to device, such as `{"reward": "cuda:1"}`.
        roles: the roles to place.
        num_gpus: GPUs to plan for; None counts this machine's.
        unused: roles without a model on this machine, which the table leaves out.

    Raises:
        UserError: an override names an unknown role, or a device that does not exist.
    """

    def __init__(
        self,
        overrides: Mapping[str, str] | None = None,
        *,
        roles: Sequence[str] = ROLES,
        num_gpus: int | None = None,
        unused: Collection[str] = (),
    ) -> None:
        self.unused = frozenset(unused)
        self.num_gpus = torch.cuda.device_count() if num_gpus is None else num_gpus
        overrides = dict(overrides or {})
        for role in overrides:
            if role not in roles:
                raise UserError(
                    f"device for unknown role {role!r}; the roles are {', '.join(roles)}",
                    code="unknown_role",
                    role=role,
                )
        self.placements = {role: self._place(role, overrides.get(role)) for role in roles}

    def device(self, role: str) -> torch.device:
        """The device of a role."""
        return self.placements[role].device

    def dtype(self, role: str) -> torch.dtype:
        """The weight dtype of a role."""
        return self.placements[role].dtype

    def autocast(self, role: str) -> contextlib.AbstractContextManager[Any]:
        """Context in which a role's forward passes run: autocast to bfloat16, or nothing in float32."""
        placement = self.placements[role]
        if placement.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(placement.device.type, dtype=placement.dtype)

    def __getattr__(self, name: str) -> Any:
        """`get_policy_device()`, `get_judge_device()` and so on: the device of a role."""
        role = name.removeprefix("get_").removesuffix("_device")
        if name == f"get_{role}_device" and role in self.__dict__.get("placements", ()):
            return lambda: self.device(role)
        raise AttributeError(f"DeviceManager has no attribute {name!r}")

    def table(self) -> list[tuple[str, str, str, str]]:
        """The plan as rows (role, device, dtype, reason) for printing."""
        return [
            (p.role, str(p.device), str(p.dtype).removeprefix("torch."), p.reason)
            for p in self.placements.values()
            if p.role not in self.unused
        ]

    def clear_memory(self) -> None:
        """Give memory that no tensor uses back: collect cycles, then empty the GPUs' caches."""
        gc.collect()
        if any(p.device.type == "cuda" for p in self.placements.values()):
            torch.cuda.empty_cache()

    def _place(self, role: str, override: str | None) -> Placement:
        if override is not None:
            device, reason = self._checked_device(role, override), "set by the config"
        else:
            device, reason = self._default_device(role)
        dtype, precision = _precision(device)
        return Placement(role, device, dtype, f"{reason}; {precision}")

    def _default_device(self, role: str) -> tuple[torch.device, str]:
        if self.num_gpus == 0:
            return torch.device("cpu"), "no GPU found"
        wanted = _GPU_OF_ROLE.get(role, 0)
        index = min(wanted, self.num_gpus - 1)
        if index < wanted:
            reason = f"shares, {self.num_gpus} GPU{'s' if self.num_gpus > 1 else ''} for all roles"
        else:
            reason = "first GPU, trained here" if index == 0 else "a GPU beside the players'"
        return torch.device("cuda", index), reason

    def _checked_device(self, role: str, name: str) -> torch.device:
        valid = ["cpu", *(f"cuda:{i}" for i in range(self.num_gpus))]
        canonical = "cuda:0" if name == "cuda" else name
        if canonical not in valid:
            raise UserError(
                f"device {name!r} for role {role!r} does not exist here; the devices are {', '.join(valid)}",
                code="unknown_device",
                role=role,
                device=name,
            )
        return torch.device(canonical)


def _precision(device: torch.device) -> tuple[torch.dtype, str]:
    if device.type == "cpu":
        return torch.float32, "float32 is exact and fastest on the CPU"
    if _gpu_capability(device.index) >= _BF16_CAPABILITY:
        return torch.bfloat16, "the GPU computes in bfloat16"
    return torch.float32, "the GPU does not compute in bfloat16"


def _gpu_capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
