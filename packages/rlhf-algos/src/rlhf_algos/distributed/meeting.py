"""Rendezvous of training processes that Ray Train starts; loads ray, whose settings must be in place."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray.train
from ray.train.backend import Backend, BackendConfig
from ray.train.torch import TorchConfig

if TYPE_CHECKING:
    from ray.train._internal.base_worker_group import BaseWorkerGroup


@dataclass
class Launch(TorchConfig):
    """Sets the rendezvous of a group's processes; the trainer makes the group, as under torchrun.

    Args:
        gpus: whether they may see GPUs.
    """

    gpus: bool = False

    @property
    def backend_cls(self) -> type[Backend]:
        """See `ray.train.backend.BackendConfig`."""
        return _Meeting


class _Meeting(Backend):
    share_cuda_visible_devices = True  # LOCAL_RANK says which device is whose

    def on_start(self, worker_group: BaseWorkerGroup, backend_config: BackendConfig) -> None:
        """Make the first process's machine the rendezvous."""
        assert isinstance(backend_config, Launch)
        address, port = worker_group.execute_single(0, _free_address)
        worker_group.execute(_meet_at, address, port, backend_config.gpus)


def _free_address() -> tuple[str, int]:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return ray.util.get_node_ip_address(), listener.getsockname()[1]


def _meet_at(address: str, port: int, gpus: bool) -> None:
    """Set the variables that torchrun sets."""
    if not gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    context = ray.train.get_context()
    os.environ |= {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "RANK": str(context.get_world_rank()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "GROUP_RANK": str(context.get_node_rank()),
    }
