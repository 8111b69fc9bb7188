"""Roles to devices."""

import pytest
import torch

from raises import raises_error
from rlhf_models import device_manager
from rlhf_models.device_manager import DeviceManager


@pytest.fixture
def capability(monkeypatch):
    """Let the planner believe in GPUs of a given compute capability."""

    def set_to(major: int, minor: int) -> None:
        monkeypatch.setattr(device_manager, "_gpu_capability", lambda index: (major, minor))

    set_to(9, 0)
    return set_to


@pytest.mark.parametrize(
    ("num_gpus", "expected"),
    [
        (0, ["cpu", "cpu", "cpu", "cpu"]),
        (1, ["cuda:0", "cuda:0", "cuda:0", "cuda:0"]),
        (2, ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]),
        (3, ["cuda:0", "cuda:0", "cuda:1", "cuda:2"]),
        (8, ["cuda:0", "cuda:0", "cuda:1", "cuda:2"]),
    ],
)
def test_players_take_the_first_gpu_and_scorers_the_next_ones(num_gpus, expected, capability):
    manager = DeviceManager(num_gpus=num_gpus)
    assert [str(manager.device(role)) for role in ("policy", "monitor", "reward", "judge")] == expected


def test_overrides_win_and_are_explained(capability):
    manager = DeviceManager({"reward": "cuda:2", "judge": "cpu", "policy": "cuda"}, num_gpus=3)
    assert [str(manager.device(role)) for role in ("policy", "reward", "judge")] == [
        "cuda:0",
        "cuda:2",
        "cpu",
    ]
    rows = {row[0]: row for row in manager.table()}
    assert rows["judge"][1:3] == ("cpu", "float32")
    assert "set by the config" in rows["reward"][3] and "set by the config" not in rows["monitor"][3]


def test_a_role_without_a_model_is_not_in_the_table():
    manager = DeviceManager(num_gpus=0, unused=["judge"])
    assert [row[0] for row in manager.table()] == ["policy", "monitor", "reward"]
    assert str(manager.device("judge")) == "cpu"


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        ({"reward": "cuda:1"}, "unknown_device"),
        ({"reward": "gpu"}, "unknown_device"),
        ({"rewards": "cpu"}, "unknown_role"),
    ],
)
def test_a_device_or_role_that_does_not_exist_is_refused(overrides, code, capability):
    with raises_error(code):
        DeviceManager(overrides, num_gpus=1 if "gpu" in overrides.values() else 0)


def test_precision_follows_the_device(capability):
    assert DeviceManager(num_gpus=0).dtype("policy") == torch.float32
    assert DeviceManager(num_gpus=1).dtype("policy") == torch.bfloat16
    capability(7, 5)
    old = DeviceManager(num_gpus=1)
    assert old.dtype("policy") == torch.float32
    assert "does not compute in bfloat16" in old.table()[0][3]


def test_the_cpu_runs_without_autocast_and_clears_memory():
    manager = DeviceManager(num_gpus=0)
    with manager.autocast("policy"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    manager.clear_memory()


def test_sharing_is_said_in_the_table(capability):
    reasons = {row[0]: row[3] for row in DeviceManager(num_gpus=1).table()}
    assert reasons["judge"] == "shares, 1 GPU for all roles; the GPU computes in bfloat16"
    assert reasons["policy"].startswith("first GPU")


def test_the_device_of_a_role_by_a_method_of_its_name():
    manager = DeviceManager(num_gpus=0)
    assert manager.get_policy_device() == manager.get_judge_device() == torch.device("cpu")
    assert not hasattr(manager, "get_pilot_device")
