"""Memory of each process, from shapes: every part by hand, and what a GPU cannot hold."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raises import raises_error
from rlhf_algos import METHODS, DPOConfig, Machine, check_start, plan_machine
from rlhf_algos.parallel.memory_plan import (
    Gathered,
    TrainedShape,
    gathered_parts,
    memory_by_phase,
    packed_in_4bit,
    trained_shape,
)
from rlhf_models import LoraSettings, add_adapters, tiny_model

SHAPE = TrainedShape(trained=1000, frozen=200.0, reference=4000.0, gathered=Gathered(100, 150, 10))
H100 = plan_machine(4, "h100")


ALONE = Machine()


def plan(machine: Machine = ALONE, *, half: bool = False, cache: float = 0.0, **settings: Any) -> Any:
    config = DPOConfig.from_dict(settings)
    return memory_by_phase(config, SHAPE, machine, half=half, activations=500.0, cache=cache)


def zero(tmp_path: Path, stage: int, **more: Any) -> str:
    section = {"stage": stage, "reduce_bucket_size": 10, "stage3_max_live_parameters": 300}
    section |= {"stage3_prefetch_bucket_size": 50, **more}
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({"zero_optimization": section}))
    return str(path)


def test_one_process_holds_all() -> None:
    """Weights 4 x 1000 + 200, gradients 4 x 1000, moments 8 x 1000; nothing is gathered."""
    phases = plan(cache=70.0)
    assert phases["load"] == {"weights": 4200, "reference": 4000, "gathered layers": 0}
    held = {"weights": 4200, "reference": 4000, "moments": 8000}
    assert phases["rollout"] == held | {"gathered layers": 0, "keys and values": 70}
    assert phases["update"] == held | {"gradients": 4000, "activations": 500}
    assert sum(phases["checkpoint"].values()) == 16200
    assert "rollout" not in plan()


def test_autocast_and_ddp_keep_copies() -> None:
    update = plan(Machine(2), half=True)["update"]
    assert update["weights in half precision"] == 2000
    assert update["buckets of gradients"] == 4000


def test_fsdp_divides_all_and_gathers_layers() -> None:
    """A quarter of each.

    Gathered in the forward pass: 3 layers of 100, as large as 2 output layers of 150, and the rest, 10.
    In the backward pass: 5 layers and 2 times the rest, 520 numbers of 4 bytes.
    """
    phases = plan(Machine(4), fsdp=True)
    assert phases["load"] == {"weights": 1050, "reference": 1000, "gathered layers": 1240}
    assert phases["update"]["gathered layers"] == 2080
    assert [phases["update"][part] for part in ("gradients", "moments")] == [1000, 2000]
    assert plan(Machine(4), half=True, fsdp=True)["load"]["gathered layers"] == 620
    offloaded = plan(H100, fsdp=True, fsdp_cpu_offload=True)["update"]
    assert [offloaded[part] for part in ("weights", "reference", "gradients", "moments")] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("gathered", "forwards", "backwards"),
    [
        (Gathered(layer=10, end=90), 2 * 90, 3 * 90),  # itself, what it is copied from; itself, two gradients
        (Gathered(layer=25, rest=90), 75 + 90, 125 + 2 * 90),  # itself and its gradient while layers run
        (Gathered(layer=1, rest=90), 3 + 90, 3 * 90),  # at the end as an output layer's
    ],
)
def test_fsdp_gathers_wide_vocabularies(gathered: Gathered, forwards: float, backwards: float) -> None:
    """In numbers of 4 bytes."""
    config = DPOConfig.from_dict({"fsdp": True})
    shape = TrainedShape(trained=200, frozen=0.0, reference=0.0, gathered=gathered)
    phases = memory_by_phase(config, shape, Machine(2), half=False, activations=0.0)
    assert phases["load"]["gathered layers"] == 4 * forwards
    assert phases["update"]["gathered layers"] == 4 * backwards


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "gathered"),
    [(1, 2200, 2000, 0), (2, 2200, 500, 0), (3, 550, 500, 700)],
)
def test_zero_divides_by_its_stage(
    stage: int, weights: float, gradients: float, gathered: float, tmp_path: Path
) -> None:
    """In bf16: 2 bytes a weight and gradient, and fp32 copy and moments, 12 x 1000 / 4."""
    update = plan(Machine(4), half=True, deepspeed=zero(tmp_path, stage))["update"]
    assert (update["weights"], update["gradients"]) == (weights, gradients)
    assert update["fp32 copy of the weights"] + update["moments"] == 3000
    assert update.get("gathered layers", 0) == gathered
    assert update["gradients in fp32"] == 1000
    assert update["buckets of gradients"] == (40 if stage == 3 else 20)


def test_zero_3_steps_weights_in_fp32_themselves(tmp_path: Path) -> None:
    copies = [plan(Machine(4), deepspeed=zero(tmp_path, stage))["update"] for stage in (1, 2, 3)]
    assert [each["fp32 copy of the weights"] for each in copies] == [1000, 1000, 0]


def test_what_deepspeed_offloads_is_not_on_the_gpu(tmp_path: Path) -> None:
    parts = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    update = plan(H100, deepspeed=zero(tmp_path, 3, **parts))["update"]
    assert [update[part] for part in ("weights", "reference", "moments", "gradients in fp32")] == [0] * 4
    assert plan(Machine(4), deepspeed=zero(tmp_path, 3, **parts))["update"]["moments"] == 2000


def test_the_shape_of_a_model() -> None:
    """LoRA trains its adapters alone; an embedding that is the output layer too is gathered with the rest."""
    model = tiny_model("llama", vocab_size=300, seed=0)
    count = sum(each.numel() for each in model.parameters())
    shape = trained_shape(model, frozen=0.0, reference=0.0, moments=8.0)
    layer = sum(each.numel() for each in model.model.layers[0].parameters())
    embedding, norm = model.lm_head.weight.numel(), model.model.norm.weight.numel()
    assert shape.trained == count
    tied = model.config.tie_word_embeddings
    assert shape.gathered == Gathered(layer, 0 if tied else embedding, norm + embedding * tied)
    adapted = add_adapters(model, ["default"], LoraSettings(lora_r=2), seed=0)
    assert trained_shape(adapted, frozen=4.0 * count, reference=0.0, moments=8.0).trained < count / 2


def test_scales_of_4_bit_weights_are_whole_in_every_process(tmp_path: Path) -> None:
    """Trained 4 x 1000 / 4, frozen 200 / 4, and 30 bytes of scales."""
    shape = replace(SHAPE, unsharded=30.0)
    for settings in ({"fsdp": True}, {"deepspeed": zero(tmp_path, 3)}):
        config = DPOConfig.from_dict(settings)
        phases = memory_by_phase(config, shape, Machine(4), half=False, activations=0.0)
        assert phases["load"]["weights"] == 1000 + 50 + 30
    whole = memory_by_phase(DPOConfig.from_dict({}), shape, Machine(4), half=False, activations=0.0)
    assert whole["load"]["weights"] == 4000 + 200 + 30


def test_4_bit_weights_are_gathered_as_they_are() -> None:
    """Two to the byte: an eighth of an fp32 parameter each; norms stay."""
    model = tiny_model("llama", vocab_size=300, seed=0)
    whole, packed = gathered_parts(model), gathered_parts(model, packed_in_4bit(model, 4))
    norms = 2 * model.model.norm.weight.numel()
    assert packed.layer == norms + (whole.layer - norms) / 8
    assert (packed.end, packed.rest) == (whole.end, whole.rest)


@pytest.mark.parametrize(
    ("given", "memory"),
    [
        ("H100", 80e9),
        ("a100-40GB", 40e9),
        ("A100_40gb", 40e9),
        ("24GB", 24e9),
        ("24 GiB", 24 * 2**30),
        ("7.5", 7.5e9),
    ],
)
def test_gpus_are_named_or_sized(given: str, memory: float) -> None:
    machine = plan_machine(2, given)
    assert machine.memory == memory and machine.processes == 2 and machine.usable == 0.9 * memory


def test_without_a_gpu_there_is_no_limit() -> None:
    assert plan_machine(3, None) == Machine(3, None, math.inf)


@pytest.mark.parametrize("given", ["h1000", "", "0GB", "-3GB", "GB"])
def test_other_gpus_are_refused(given: str) -> None:
    with raises_error("invalid_value", key="gpu"):
        plan_machine(1, given)


def test_8_bit_weights_are_not_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")  # as torchrun sets it
    quantised = {"model_name_or_path": "a-model", "load_in_8bit": True, "use_peft": True}
    config = METHODS["dpo"].resolve(quantised | {"fsdp": True})
    for processes in (1, 2):  # FSDP wraps the layers of a single process too
        with raises_error("quantised_and_sharded"):
            check_start(METHODS["dpo"], config, Machine(processes))
