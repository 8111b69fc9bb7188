"""Models read in parts, here by a group of one process: the same values, put in place later."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from proofs import by_default
from rlhf_models import (
    LoraSettings,
    RewardModel,
    add_adapters,
    fill_deferred,
    gathering,
    is_deferred,
    is_sharded,
    load_causal_lm,
    save_weights,
    tiny_model,
    train_byte_tokenizer,
    whole_value,
)
from rlhf_models.loading.saving import complete, outlines
from rlhf_models.loading.shards import forget_pages, mapped_files, random_draws_on_meta

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(
    params=by_default(["llama", "gpt2", "gemma2"], "llama", "gpt2")
)  # gpt2 and gemma2 tie embedding and output layer
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tokenizer = train_byte_tokenizer(["a story"])
    tiny_model(request.param, vocab_size=len(tokenizer), seed=0).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def values(model: nn.Module) -> dict[str, Any]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    mine, its = values(one), values(other)
    assert mine.keys() == its.keys()
    assert all(torch.equal(mine[name], its[name]) for name in mine)


def test_a_deferred_model_becomes_the_one_that_is_loaded_whole(folder: Path) -> None:
    deferred = load_causal_lm(folder, sharded=True)
    assert is_deferred(deferred) and all(each.is_meta for each in deferred.parameters())
    fill_deferred(deferred, CPU)
    assert not is_deferred(deferred)
    assert_equal(deferred, load_causal_lm(folder))


def test_new_adapters_and_heads_are_those_of_a_whole_model(folder: Path) -> None:
    """They are drawn at random, from the same seed, after the same draws."""
    lora = LoraSettings(lora_r=2)
    for make in (
        lambda **how: add_adapters(load_causal_lm(folder, **how), ["default"], lora, seed=0),
        lambda **how: RewardModel.from_language_model(folder, seed=3, **how),
        lambda **how: RewardModel.from_language_model(folder, seed=3, **how).add_lora(lora),
    ):
        deferred, whole = make(sharded=True), make()
        fill_deferred(deferred, CPU)
        assert_equal(deferred, whole)


def test_random_numbers_go_on_as_after_a_real_initialisation() -> None:
    torch.manual_seed(0)
    nn.Linear(3, 5)
    expected = torch.rand(2)
    torch.manual_seed(0)
    with random_draws_on_meta():
        made = nn.Linear(3, 5)
    assert made.weight.is_meta
    assert torch.equal(torch.rand(2), expected)


def sharded(folder: Path) -> Any:
    model = load_causal_lm(folder, sharded=True)
    fully_shard(model)
    fill_deferred(model, CPU)
    return model


def test_a_sharded_parameter_is_read_where_it_is_gathered(folder: Path) -> None:
    model = sharded(folder)
    parameter = next(model.parameters())
    assert is_sharded(parameter)
    with pytest.raises(ValueError, match="gather"):
        whole_value(parameter)
    with gathering(lambda tensor: tensor.full_tensor()):  # pyright: ignore[reportAttributeAccessIssue]
        assert torch.equal(whole_value(parameter).cpu(), next(load_causal_lm(folder).parameters()))


def test_a_sharded_model_is_saved_as_a_whole_one(folder: Path, tmp_path: Path) -> None:
    with gathering(lambda tensor: tensor.full_tensor()):  # pyright: ignore[reportAttributeAccessIssue]
        save_weights(sharded(folder), tmp_path / "saved")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    again, info = loaded
    assert not any(info.values())
    assert again.config.architectures == [type(again).__name__]
    assert_equal(again, AutoModelForCausalLM.from_pretrained(folder))


def test_an_outline_is_completed_by_the_weights(folder: Path, tmp_path: Path) -> None:
    holder = nn.Module()
    holder.lm = sharded(folder)
    with outlines(holder):
        save_weights(holder.lm, tmp_path / "saved")
    assert not list((tmp_path / "saved").glob("*.safetensors"))
    parameters = holder.named_parameters(remove_duplicate=False)  # DeepSpeed names tied weights twice
    named = [(name, each.full_tensor()) for name, each in parameters if isinstance(each, DTensor)]
    complete(tmp_path / "saved", named)
    (file,) = (tmp_path / "saved").glob("*.safetensors")
    assert load_file(file).keys() == dict(holder.lm.named_parameters()).keys()
    assert_equal(
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), AutoModelForCausalLM.from_pretrained(folder)
    )


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say which pages a process has")
def test_the_pages_of_a_file_are_let_go_and_read_again(tmp_path: Path):
    path = tmp_path / "weights.safetensors"
    save_file({"weight": torch.arange(1 << 20, dtype=torch.float32)}, path)
    with safe_open(path, "pt") as file:
        weight = file.get_tensor("weight")
    total = weight.sum()
    assert _resident(path) >= 4096  # 4 MiB of numbers
    forget_pages(torch.empty(1 << 20), mapped_files())  # not of a file
    assert _resident(path) >= 4096
    forget_pages(weight, mapped_files())
    assert _resident(path) == 0
    assert weight.sum() == total


def _resident(file: Path) -> int:
    """KiB of a file that this process has in memory."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1])
    return found
