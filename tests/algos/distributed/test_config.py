"""Settings of rollout workers: what is refused, with a sentence."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from typing import Any

import pytest

from raises import raises_error
from rlhf_algos import METHODS
from rlhf_algos.distributed.config import (
    ClusterConfig,
    DistributedConfig,
    check_reachable,
    require_ray,
    samplers,
    started_cluster,
)
from rlhf_data import UserError


@pytest.mark.parametrize("address", ["auto", "local", "10.0.0.1:6379", "ray://head:10001"])
def test_addresses(address: str):
    assert DistributedConfig(address=address).address == address


@pytest.mark.parametrize("address", ["", "head", "ray://head", "head:port", "ray://:10001"])
def test_what_is_no_address(address: str):
    with raises_error("invalid_value", key="distributed.address"):
        METHODS["grpo"].resolve({"distributed": {"address": address}})


@pytest.mark.parametrize("key", ["cpus_per_trainer", "cpus_per_worker", "group_timeout", "start_timeout"])
def test_there_is_at_least_some(key: str):
    with raises_error("invalid_value", key=f"distributed.{key}"):
        METHODS["ppo"].resolve({"distributed": {key: 0}})


def test_an_unknown_key_is_refused():
    with raises_error("unknown_key", key="distributed.workers"):
        METHODS["grpo"].resolve({"distributed": {"workers": 2}})


@pytest.mark.parametrize(
    "other",
    [
        {"use_vllm": True, "vllm_mode": "server"},
        {"load_in_4bit": True, "use_peft": True, "model_name_or_path": "somewhere"},
    ],
    ids=["server", "4bit"],
)
def test_what_workers_cannot_follow_is_refused(other: dict[str, Any]):
    METHODS["grpo"].resolve(other)
    with pytest.raises(UserError, match="distributed"):
        METHODS["grpo"].resolve(other | {"distributed": {}})


def test_several_training_processes_have_workers_of_both_kinds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = samplers(METHODS["grpo"].resolve({"distributed": {"reward_workers": 2}, "fsdp": True}))
    assert found is not None and (found.rollout_workers, found.reward_workers) == (1, 2)


def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises_error("missing_package"):
        require_ray(ClusterConfig(trainer_workers=1))


def test_a_dashboard_wants_what_ray_alone_does_not_bring(monkeypatch: pytest.MonkeyPatch):
    spec = importlib.util.find_spec("json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "ray" else None)
    require_ray(ClusterConfig(trainer_workers=1))
    with raises_error("missing_package"):
        require_ray(ClusterConfig(trainer_workers=1, dashboard=True))


def test_a_cluster_that_nothing_answers_for_is_refused_at_once(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        check_reachable(DistributedConfig(address=address))
    for name in (address, f"ray://{address}"):
        with raises_error("cluster_unreachable", address=name):
            check_reachable(DistributedConfig(address=name))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    check_reachable(DistributedConfig())
    monkeypatch.setenv("RAY_ADDRESS", address)
    with raises_error("cluster_unreachable", address=address):
        check_reachable(DistributedConfig())


def test_auto_is_the_cluster_of_ray_start_if_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert started_cluster() is None
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray/ray_current_cluster").write_text(address)
        assert started_cluster() == address
    assert started_cluster() is None
    (tmp_path / "ray/ray_current_cluster").write_text("nonsense")
    assert started_cluster() is None
