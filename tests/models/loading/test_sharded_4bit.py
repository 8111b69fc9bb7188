"""4-bit weights that are read in parts, here by a group of one process: what one process loads whole."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

from raises import raises_error
from rlhf_data import TokenSequence, pack
from rlhf_models import (
    LoraSettings,
    RewardModel,
    add_adapters,
    build_tiny_llama,
    fill_deferred,
    load_causal_lm,
    token_logps,
    train_byte_tokenizer,
)

pytest.importorskip("bitsandbytes")
sharded_4bit = importlib.import_module("rlhf_models.kernels.sharded_4bit")
CPU = torch.device("cpu")
LORA = LoraSettings(lora_r=2)
(BATCH,) = pack([TokenSequence([5, 9, 14, 3, 27], 2), TokenSequence([5, 9, 14, 60], 2)])


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["llama", "gpt2"])  # GPT-2 stores the transpose of its weights
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model whose layers are as wide as the blocks of 4-bit weights."""
    tokenizer = train_byte_tokenizer(["a story"])
    size = len(tokenizer)
    if request.param == "llama":
        model: Any = build_tiny_llama(size, hidden_size=64, intermediate_size=128, eos_token_id=2)
    else:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=size, n_embd=64, n_layer=2, n_head=2, n_positions=64))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def adapted(folder: Path, *, deferred: bool = False, shard: bool = False) -> Any:
    model = load_causal_lm(folder, load_in_4bit=True, sharded=deferred)
    model = add_adapters(model, ["default"], LORA, seed=0)
    if shard:
        fully_shard(model)
    if deferred:
        fill_deferred(model, CPU)
    return model


def trained(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, each) for name, each in model.named_parameters() if each.requires_grad]


@pytest.mark.parametrize("shard", [False, True])
def test_scores_and_gradients_are_those_of_a_model_in_one_piece(
    folder: Path, shard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded_4bit, "_PIECE", 1024)  # a weight is packed in several pieces
    whole, parts = adapted(folder), adapted(folder, deferred=True, shard=shard)
    outputs = []
    for model in (whole, parts):
        plain = model(input_ids=torch.tensor([[5, 9, 14, 3, 27]])).logits if shard else None
        outputs.append(token_logps(model, BATCH).logps if plain is None else plain)
        outputs[-1].sum().backward()
    assert torch.equal(*outputs)
    assert [name for name, _ in trained(whole)] == [name for name, _ in trained(parts)]
    for (name, one), (_, other) in zip(trained(whole), trained(parts), strict=True):
        grad = other.grad.full_tensor() if shard else other.grad
        torch.testing.assert_close(grad, one.grad, msg=name)
    packed = sum(each.numel() for each in parts.parameters() if each.dtype == torch.uint8)
    assert packed == sum(each.numel() for each in whole.parameters() if each.dtype == torch.uint8) > 10_000


def test_a_reward_model_keeps_its_head_in_full(folder: Path) -> None:
    made = []
    hows: list[dict[str, Any]] = [{}, {"sharded": True}]
    for how in hows:
        made.append(RewardModel.from_language_model(folder, seed=3, load_in_4bit=True, **how).add_lora(LORA))
    fill_deferred(made[1], CPU)
    scores = [model(BATCH) for model in made]
    assert torch.equal(*scores)
    heads = [
        {n for n, each in trained(model) if "score" in n and each.dtype == torch.float32} for model in made
    ]
    assert heads[0] == heads[1] and len(heads[0]) == 1


def test_weights_are_packed_into_the_storage_that_is_asked_for(folder: Path) -> None:
    """ZeRO-3 takes parameters of one type; the numbers stay."""
    models = [load_causal_lm(folder, load_in_4bit=True, sharded=True) for _ in range(2)]
    placed: list[nn.Parameter] = []
    fill_deferred(models[0], CPU, storage=torch.bfloat16, then=placed.append)
    fill_deferred(models[1], CPU)
    kinds = {each.dtype for each in placed}
    assert kinds == {torch.float32, torch.bfloat16}
    first, second = (token_logps(model, BATCH).logps for model in models)
    assert torch.equal(first, second)


def test_what_cannot_be_sharded_is_refused(folder: Path, tmp_path: Path) -> None:
    with raises_error("quantised_and_sharded"):
        load_causal_lm(folder, load_in_8bit=True, sharded=True)
    load_causal_lm(folder, load_in_4bit=True).save_pretrained(tmp_path / "packed")
    with raises_error("quantised_and_sharded"):
        load_causal_lm(tmp_path / "packed", sharded=True)
    build_tiny_llama(300, hidden_size=48, intermediate_size=64).save_pretrained(tmp_path / "narrow")
    with raises_error("layer_cannot_be_quantized"):
        load_causal_lm(tmp_path / "narrow", load_in_4bit=True, sharded=True)
