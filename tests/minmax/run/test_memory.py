"""What a run is expected to need of memory, part by part."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from raises import raises_error
from rlhf_algos import Machine
from rlhf_algos.parallel.memory_plan import plan_machine
from rlhf_minmax import MinMaxConfig
from rlhf_minmax.run.checks import ModelInfo
from rlhf_minmax.run.dry_run import plan_run
from rlhf_minmax.run.memory import estimate_memory
from rlhf_models import DeviceManager, tiny_model
from small_game import make

pytestmark = pytest.mark.usefixtures("quick_plans")

CONFIGS = Path(__file__).parents[3] / "configs"


def info(config: Any) -> ModelInfo:
    return ModelInfo(None, config, None)


def memory(config: MinMaxConfig, model: Any, machine: Machine | None = None, **tokens: int) -> Any:
    """Bytes of the parts of the phases of the one device."""
    models = {"policy": info(model.config), "monitor": info(model.config)}
    sizes = {"pass_tokens": 0, "cache_tokens": 0} | tokens
    (found,) = estimate_memory(config, models, DeviceManager(num_gpus=0), machine, **sizes).values()
    return found


def training(phases: Any) -> float:
    return phases["update"]["gradients"] + phases["update"]["moments"]


def test_memory_of_adapters() -> None:
    """A frozen backbone; a parameter of three adapters takes 4 bytes and 8 of moments; one gradient."""
    model, size = tiny_model("llama"), trained(tiny_model("llama"))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    found = memory(make(), model)
    assert found["load"]["weights"] == weights + 3 * 4 * size
    assert training(found) == 3 * 8 * size + 4 * size
    assert training(memory(make("baseline=false"), model)) == 2 * 8 * size + 4 * size


def test_memory_of_full_training() -> None:
    """Policy, plain and monitor, with one reference for the first two and one for the other."""
    model = tiny_model("qwen2")
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    full = make("policy_model.use_lora=false", "monitor_model.use_lora=false")
    found = memory(full, model)
    assert (found["load"]["weights"], found["load"]["reference"]) == (3 * weights, 2 * weights)
    assert training(found) == 3 * 2 * weights + weights


@pytest.mark.parametrize("mode", ["training.fsdp=true", f"training.deepspeed={CONFIGS / 'zero3.json'}"])
def test_memory_of_a_sharded_run(mode: str) -> None:
    """The frozen backbone, two adapters and what is kept of them are a quarter in each of four processes."""
    model, settings = tiny_model("llama"), ("baseline=false", "guards.rollback=false")
    one = memory(make(*settings), model)
    four = memory(make(*settings, mode), model, Machine(4))
    assert four["load"]["weights"] == one["load"]["weights"] / 4
    assert four["update"]["moments"] == one["update"]["moments"] / 4
    kept = memory(make("baseline=false", mode), model, Machine(4))["update"]["copies"]
    assert kept == memory(make("baseline=false"), model)["update"]["copies"] / 4


def trained(model: Any, rank: int = 16) -> int:
    """Parameters of one adapter."""
    from rlhf_models import LoraSettings, add_adapters

    adapted = add_adapters(model, ["policy"], LoraSettings(lora_r=rank))
    return sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)


@pytest.mark.parametrize(
    ("overrides", "copies"),
    [
        ((), 2 * 3),  # the guards' players: last good, measured, newest
        (("guards.rollback=false",), 0),
        (("guards.rollback=false", "diagnostics.cross_play_steps=5"), 2 * 5),
    ],
)
def test_memory_of_copies(overrides: tuple[str, ...], copies: int) -> None:
    """4 bytes for each parameter of an adapter and each copy; whole models likewise."""
    found = memory(make(*overrides), tiny_model("llama"))
    assert found["update"].get("copies", 0) == 4 * trained(tiny_model("llama")) * copies
    full = ("policy_model.use_lora=false", "monitor_model.use_lora=false")
    model = tiny_model("qwen2")
    parameters = sum(p.numel() for p in model.parameters())
    assert memory(make(*overrides, *full), model)["update"].get("copies", 0) == 4 * parameters * copies


def test_memory_of_best_response_probes() -> None:
    """Gradient and moments of the larger player once more, 12 bytes a parameter, and a copy of it."""
    for full, model in ((), tiny_model("llama")), (("monitor_model.use_lora=false",), tiny_model("llama")):
        size = sum(p.numel() for p in model.parameters()) if full else trained(tiny_model("llama"))
        plain, probed = (
            memory(make(*full, f"diagnostics.best_response_updates={updates}"), model)["update"]
            for updates in (0, 2)
        )
        assert probed["best-response probes"] == 12 * size
        assert probed["copies"] == plain["copies"] + 4 * size


def test_probes_of_past_players_keep_both_players() -> None:
    """Five past versions of two players, what a probe alone keeps, and both as they were at the end."""
    model, more = tiny_model("llama"), "diagnostics.best_response_updates=2"
    probed, both = (
        memory(make(more, *past), model)["update"]["copies"]
        for past in ((), ("diagnostics.cross_play_steps=5",))
    )
    assert both == probed + 4 * trained(tiny_model("llama")) * (2 * 5 + 2)


def test_memory_of_a_critic() -> None:
    """w and b on hidden states of 32: 33 parameters, for each player that has one."""
    plain, one = memory(make(), tiny_model("llama")), "policy_model.baseline=critic"
    for critics, settings in ((1, (one,)), (2, (one, "monitor_model.baseline=critic"))):
        found = memory(make(*settings), tiny_model("llama"))
        assert found["load"]["weights"] == plain["load"]["weights"] + critics * 4 * 33
        assert found["update"]["moments"] == plain["update"]["moments"] + critics * 8 * 33


def test_past_players_are_kept_on_the_cpu() -> None:
    """Of players on a planned GPU."""
    model = tiny_model("llama")
    models = {"policy": info(model.config), "monitor": info(model.config)}
    size, sizes = 4 * trained(tiny_model("llama")), {"pass_tokens": 0, "cache_tokens": 0}
    config = make("diagnostics.cross_play_steps=5")
    machine = plan_machine(1, "24GB")
    found = estimate_memory(config, models, DeviceManager(num_gpus=0), machine, **sizes)
    gpu, cpu = found[torch.device("cuda", 0)], found[torch.device("cpu")]
    assert "copies" not in gpu["update"]
    assert cpu["update"] == {"copies": (2 * 3 + 2 * 5) * size}
    alone = estimate_memory(
        make("guards.rollback=false"), models, DeviceManager(num_gpus=0), machine, **sizes
    )
    assert (
        list(alone) == [torch.device("cuda", 0)] and "copies" not in alone[torch.device("cuda", 0)]["update"]
    )


def test_a_run_that_does_not_fit_is_refused_with_what_does() -> None:
    plan_run(make(), plan_machine(2, "1GB"))
    with raises_error("does_not_fit") as refused:
        plan_run(make(), plan_machine(2, "0.001GB"))
    assert refused.value.fields["needed"] > refused.value.fields["usable"] == 0.9e6


def test_memory_of_quantised_weights() -> None:
    """Linear layers but the head take one byte a weight, everything else stays."""
    model = tiny_model("llama")
    linear = sum(
        module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    )
    weights = memory(make(), model)["load"]["weights"]
    eight = ("policy_model.load_in_8bit=true", "monitor_model.load_in_8bit=true")
    assert memory(make(*eight), model)["load"]["weights"] == weights - 3 * linear
    four = ("policy_model.load_in_4bit=true",)
    assert memory(make(*four), model)["load"]["weights"] == pytest.approx(weights - (4 - 0.516) * linear)


def test_memory_of_activations() -> None:
    """Hidden 32, intermediate 64, 2 layers, 300 tokens of vocabulary, 2 key-value heads of 8, fp32.

    A layer keeps 10 x 32 + 2 x 16 + 4 x 64 = 608 values of a token, a pass of 10 tokens 10 x 2 x 608 x 4 =
    48640 bytes, and 3 x 10 x 300 x 4 = 36000 of logits. 1000 tokens of keys and values: 1000 x 2 x 2 x 2 x 8
    x 4 = 256000. With checkpointing a pass keeps 10 x (2 x 32 + 608) x 4 = 26880.
    """
    model = tiny_model("llama")
    assert memory(make(), model, pass_tokens=10)["update"]["activations"] == 48640 + 36000
    assert memory(make(), model, pass_tokens=10, cache_tokens=1000)["rollout"]["keys and values"] == 256000
    saving = make("policy_model.gradient_checkpointing=true")
    assert memory(saving, model, pass_tokens=10)["update"]["activations"] == 26880 + 36000


@pytest.mark.slow
@pytest.mark.proof
def test_the_plan_of_a_game_is_near_the_peak_of_a_real_one() -> None:
    """40 million parameters, and two scorers of that size, with LoRA and in full: within 15%."""
    command = [sys.executable, CONFIGS.parent / "benchmarks/memory_plan.py", "--shapes", "wide game"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout)["rows"]
    assert rows and all(0.85 <= row["ratio"] <= 1.15 for row in rows), rows
