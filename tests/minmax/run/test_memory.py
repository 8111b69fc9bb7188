"""What a run is expected to need of memory, part by part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_data import apply_overrides
from rlhf_minmax import MinMaxConfig
from rlhf_minmax.run.checks import ModelInfo
from rlhf_minmax.run.dry_run import plan_run
from rlhf_minmax.run.memory import estimate_memory, state_bytes
from rlhf_models import DeviceManager, tiny_model

CONFIGS = Path(__file__).parents[3] / "configs"
TINY = ("data.train_stories=20", "data.eval_stories=8", "training.batch_size=4", "demo.num_stories=20")


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # To measure how long building takes is most of a plan; other tests do.
    monkeypatch.setattr("rlhf_minmax.run.checks.build_seconds", lambda *_, **__: 60.0)


def make(*overrides: str) -> MinMaxConfig:
    return MinMaxConfig.from_dict(apply_overrides({}, [*TINY, *overrides]))


def plan(*overrides: str) -> dict[str, str]:
    return dict(plan_run(make(*overrides))["rows"])


def info(config: Any) -> ModelInfo:
    return ModelInfo(None, config, None)


def memory(config: MinMaxConfig, model: Any, **tokens: int) -> Any:
    models = {"policy": info(model.config), "monitor": info(model.config)}
    (found,) = estimate_memory(
        config, models, DeviceManager(), **{"pass_tokens": 0, "cache_tokens": 0} | tokens
    )
    return found


def test_memory_of_adapters() -> None:
    """One frozen backbone in fp32; for every parameter of three adapters 4 bytes, and 12 of training."""
    from rlhf_models import LoraSettings, add_adapters

    model = tiny_model("llama")
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    adapted = add_adapters(model, ["policy", "plain", "monitor"], LoraSettings(lora_r=16))
    adapters = sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)
    found = memory(make(), tiny_model("llama"))
    assert (found.weights, found.training, found.activations) == (weights + 4 * adapters, 12 * adapters, 0)
    assert memory(make("baseline=false"), tiny_model("llama")).training == 12 * adapters * 2 / 3


def test_memory_of_full_training() -> None:
    """Policy and plain with one reference, monitor with one: 5 copies; 3 players with 3 states each."""
    model = tiny_model("qwen2")
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    full = make("policy_model.use_lora=false", "monitor_model.use_lora=false")
    found = memory(full, model)
    assert (found.weights, found.training) == (5 * weights, 9 * weights)


@pytest.mark.parametrize(
    ("sharding", "processes", "expected"),
    [
        (None, 8, 12),  # gradient 4, moments 8
        (1, 8, 4 + 12 / 8),  # the gradient whole; moments and DeepSpeed's copy sharded
        (2, 8, 16 / 8),
        (2, 1, 16),
        (3, 8, 20 / 8),  # a sharded weight besides, for the player itself stays whole
        ("fsdp", 8, 16 / 8),  # weight, gradient and moments
    ],
)
def test_bytes_of_the_training_state(sharding: int | str | None, processes: int, expected: float) -> None:
    assert state_bytes(sharding, processes) == expected


def test_memory_of_a_sharded_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three adapters in 4 processes with ZeRO-2: 16 / 4 bytes a parameter."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    zero = f"training.deepspeed={CONFIGS / 'zero2.json'}"
    found = memory(make(zero), tiny_model("llama"))
    assert found.training == 3 * 16 / 4 * trained(tiny_model("llama"))


def trained(model: Any, rank: int = 16) -> int:
    """Parameters of one adapter."""
    from rlhf_models import LoraSettings, add_adapters

    adapted = add_adapters(model, ["policy"], LoraSettings(lora_r=rank))
    return sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)


@pytest.mark.parametrize(
    ("overrides", "copies"),
    [
        ((), 3),  # the guard's monitors: last good, measured, newest
        (("guards.rollback=false",), 0),
        (("guards.rollback=false", "policy_model.average_decay=0.9"), 1),
        (("guards.rollback=false", "schedule.extragradient=true"), 2),
        (("policy_model.step_rule=optimistic", "monitor_model.average_decay=0.9"), 3 + 2 + 1),
        (("guards.rollback=false", "pool.every=5", "pool.size=7"), 2 * 7),
    ],
)
def test_memory_of_copies(overrides: tuple[str, ...], copies: int) -> None:
    """4 bytes for each parameter of an adapter and each copy; whole models likewise."""
    found = memory(make(*overrides), tiny_model("llama"))
    assert found.copies == 4 * trained(tiny_model("llama")) * copies
    assert found.total == found.weights + found.training + found.activations + found.copies
    full = ("policy_model.use_lora=false", "monitor_model.use_lora=false")
    model = tiny_model("qwen2")
    parameters = sum(p.numel() for p in model.parameters())
    assert memory(make(*overrides, *full), model).copies == 4 * parameters * copies


def test_memory_of_best_response_probes() -> None:
    """Gradient and moments of one more adapter, 12 bytes a parameter, and a copy of it."""
    plain, probed = (
        memory(make(f"diagnostics.best_response_updates={updates}"), tiny_model("llama"))
        for updates in (0, 2)
    )
    assert probed.training == plain.training + 12 * trained(tiny_model("llama"))
    assert probed.copies == plain.copies + 4 * trained(tiny_model("llama"))
    # A monitor that trains all its weights is the larger player.
    full = "monitor_model.use_lora=false"
    plain, probed = (
        memory(make(full, f"diagnostics.best_response_updates={updates}"), tiny_model("llama"))
        for updates in (0, 2)
    )
    parameters = sum(p.numel() for p in tiny_model("llama").parameters())
    assert parameters > trained(tiny_model("llama"))
    assert probed.training == plain.training + 12 * parameters


def test_memory_of_a_critic() -> None:
    """w and b on hidden states of 32: 33 parameters of 4 + 12 bytes, for each player that has one."""
    plain, one = memory(make(), tiny_model("llama")), "policy_model.baseline=critic"
    for critics, settings in ((1, (one,)), (2, (one, "monitor_model.baseline=critic"))):
        found = memory(make(*settings), tiny_model("llama"))
        assert found.weights == plain.weights + critics * 4 * 33
        assert found.training == plain.training + critics * 12 * 33


def test_past_players_are_kept_on_the_cpu() -> None:
    """Players on a GPU: guard and pools are on the CPU, an average is where its player is."""

    class OnGPU(DeviceManager):
        def device(self, role: str) -> torch.device:
            return torch.device("cuda:0")

    model = tiny_model("llama")
    models = {"policy": info(model.config), "monitor": info(model.config)}
    size, sizes = 4 * trained(tiny_model("llama")), {"pass_tokens": 0, "cache_tokens": 0}
    config = make("policy_model.average_decay=0.9", "pool.every=5", "pool.size=2")
    gpu, cpu = estimate_memory(config, models, OnGPU({}), **sizes)
    assert (gpu.device.type, gpu.copies, cpu.device.type) == ("cuda", size, "cpu")
    assert cpu.copies == cpu.total == (3 + 2 * 2) * size
    (alone,) = estimate_memory(make("guards.rollback=false"), models, OnGPU({}), **sizes)
    assert alone.device.type == "cuda" and alone.copies == 0
    assert (
        ", copies " in plan()["memory on cpu"]
        and "copies" not in plan("guards.rollback=false")["memory on cpu"]
    )


def test_memory_of_quantised_weights() -> None:
    """Linear layers but the head take one byte a weight, everything else stays."""
    model = tiny_model("llama")
    linear = sum(
        module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    )
    weights = memory(make(), model).weights
    eight = ("policy_model.load_in_8bit=true", "monitor_model.load_in_8bit=true")
    assert memory(make(*eight), model).weights == weights - 3 * linear
    four = ("policy_model.load_in_4bit=true",)
    assert memory(make(*four), model).weights == pytest.approx(weights - (4 - 0.516) * linear)


def test_memory_of_activations() -> None:
    """Hidden 32, intermediate 64, 2 layers, 300 tokens of vocabulary, 2 key-value heads of 8, fp32.

    A pass of 10 tokens: 10 x 2 x (8 x 32 + 2 x 64) x 4 = 30720 bytes, and 3 x 10 x 300 x 4 = 36000 of logits.
    1000 tokens of keys and values: 1000 x 2 x 2 x 2 x 8 x 4 = 256000. With checkpointing a pass keeps
    10 x (2 x 32 + 8 x 32 + 2 x 64) x 4 = 17920.
    """
    model = tiny_model("llama")
    assert memory(make(), model, pass_tokens=10).activations == 30720 + 36000
    assert memory(make(), model, pass_tokens=10, cache_tokens=1000).activations == 256000
    saving = make("policy_model.gradient_checkpointing=true")
    assert memory(saving, model, pass_tokens=10).activations == 17920 + 36000
