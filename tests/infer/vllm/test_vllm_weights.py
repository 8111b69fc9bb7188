"""Weights on their way to vLLM: names and values of a checkpoint, adapters merged, the model untouched."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel

from proofs import by_default
from raises import raises_error
from rlhf_infer.vllm.weight_export import policy_tensors, write_adapter_folder, write_weight_folder
from rlhf_models import fill_deferred, gathering, load_causal_lm
from rlhf_models.adapters.files import load_adapter
from rlhf_models.adapters.lora import LoraSettings, add_adapters, apply_lora
from rlhf_models.loading import saving
from rlhf_models.loading.tiny import TINY_ARCHITECTURES, random_model, tiny_model

IDS = torch.arange(3, 12)[None]


def small_model(name: str) -> PreTrainedModel:
    if name == "mixtral":  # experts that are one tensor in memory and several in files
        sizes: dict[str, Any] = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
        }
        sizes["num_key_value_heads"] = 2
        return random_model(MixtralConfig(vocab_size=40, num_local_experts=3, pad_token_id=None, **sizes), 0)
    return tiny_model(name, vocab_size=40, pad_token_id=None)


def with_adapter(model: Any, **settings: Any) -> Any:
    peft_model = apply_lora(copy.deepcopy(model), LoraSettings(lora_r=4, **settings))
    randomise(peft_model)
    return peft_model


def randomise(peft_model: Any) -> None:
    torch.manual_seed(1)
    for name, parameter in peft_model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, attention_mask=torch.ones_like(IDS)).logits


def values(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", by_default([*TINY_ARCHITECTURES, "mixtral"], "llama", "gpt2", "mixtral"))
def test_names_and_values_are_those_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    model = small_model(name)
    model.save_pretrained(tmp_path / "saved")
    write_weight_folder(model, tmp_path / "written")
    saved, written = (load_file(tmp_path / n / "model.safetensors") for n in ("saved", "written"))
    assert set(saved) == set(written)
    assert all(torch.equal(saved[key], written[key]) for key in saved)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "written")
    assert torch.equal(logits(loaded), logits(model))
    configs = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("saved", "written")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("name", by_default(TINY_ARCHITECTURES, "llama", "gpt2"))
@pytest.mark.parametrize("rank_stabilised", by_default([False, True], True))
def test_the_active_adapter_is_merged_and_the_model_stays_as_it_is(name: str, rank_stabilised: bool) -> None:
    model = small_model(name)
    peft_model = with_adapter(model, use_rslora=rank_stabilised)
    before = values(peft_model)
    tensors = dict(policy_tensors(peft_model))
    assert all(torch.equal(before[key], value) for key, value in peft_model.state_dict().items())
    assert set(tensors) == {key for key, _ in model.named_parameters()}
    assert not any(tensor.requires_grad for tensor in tensors.values())
    fresh = small_model(name)
    fresh.load_state_dict(tensors, strict=False)
    torch.testing.assert_close(logits(fresh), logits(peft_model), atol=2e-5, rtol=0)
    assert not torch.allclose(logits(fresh), logits(model), atol=1e-2)
    with peft_model.disable_adapter():
        bare = dict(policy_tensors(peft_model))
    assert all(torch.equal(bare[key], value) for key, value in model.named_parameters())


def test_of_several_adapters_the_active_one_counts() -> None:
    model = small_model("llama")
    peft_model = add_adapters(copy.deepcopy(model), ["first", "second"], LoraSettings(lora_r=4))
    randomise(peft_model)
    found = []
    for name in ("first", "second"):
        peft_model.set_adapter(name)
        fresh = small_model("llama")
        fresh.load_state_dict(dict(policy_tensors(peft_model)))
        torch.testing.assert_close(logits(fresh), logits(peft_model), atol=2e-5, rtol=0)
        found.append(logits(fresh))
    assert not torch.allclose(*found, atol=1e-2)
    peft_model.merge_adapter(["first"])
    merged = small_model("llama")
    merged.load_state_dict(dict(policy_tensors(peft_model)))
    torch.testing.assert_close(logits(merged), found[0], atol=2e-5, rtol=0)


def test_whole_layers_and_biases_of_an_adapter_come_along() -> None:
    from peft import LoraConfig, get_peft_model

    model = small_model("qwen2")  # its attention has biases
    config = LoraConfig(r=4, target_modules=["q_proj"], lora_bias=True, modules_to_save=["lm_head"])
    peft_model: Any = get_peft_model(copy.deepcopy(model), config).eval()
    torch.manual_seed(1)
    for name, parameter in peft_model.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
        assert "original_module" not in name or not parameter.requires_grad
    fresh = small_model("qwen2")
    fresh.load_state_dict(dict(policy_tensors(peft_model)))
    torch.testing.assert_close(logits(fresh), logits(peft_model), atol=2e-5, rtol=0)
    with peft_model.disable_adapter():
        fresh.load_state_dict(dict(policy_tensors(peft_model)))
    assert torch.equal(logits(fresh), logits(model))


def test_half_precision_is_rounded_once() -> None:
    model: Any = small_model("llama")
    model = model.to(torch.bfloat16)
    peft_model = with_adapter(model)
    layer = peft_model.get_base_model().model.layers[0].mlp.up_proj
    exact = layer.base_layer.weight.float() + layer.get_delta_weight("default").float()
    tensors = dict(policy_tensors(peft_model))
    assert torch.equal(tensors["model.layers.0.mlp.up_proj.weight"], exact.to(torch.bfloat16))


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_come_as_what_the_model_computes_with(bits: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 32}
    plain = tiny_model("llama", vocab_size=40, pad_token_id=None, **sizes)
    plain.save_pretrained(tmp_path)
    model = load_causal_lm(tmp_path, load_in_8bit=bits == 8, load_in_4bit=bits == 4)
    peft_model = apply_lora(model, LoraSettings(lora_r=4))
    randomise(peft_model)
    before = logits(peft_model)
    write_weight_folder(peft_model, tmp_path / "merged")
    fresh: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(fresh), before, atol=1e-4, rtol=0)
    assert torch.equal(logits(peft_model), before)


def test_4_bit_weights_in_parts_come_whole(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 32}
    tiny_model("llama", vocab_size=40, pad_token_id=None, **sizes).save_pretrained(tmp_path)
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    try:
        parts = load_causal_lm(tmp_path, load_in_4bit=True, sharded=True)
        fully_shard(parts)
        fill_deferred(parts, torch.device("cpu"))
        with gathering(lambda tensor: tensor.full_tensor()):  # pyright: ignore[reportAttributeAccessIssue]
            found = dict(policy_tensors(parts))
    finally:
        dist.destroy_process_group()
    expected = dict(policy_tensors(load_causal_lm(tmp_path, load_in_4bit=True)))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_large_folders_have_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "FILE_BYTES", 20_000)
    model = small_model("llama")
    write_weight_folder(model, tmp_path / "m")
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "m").glob("*.safetensors"))
    assert len(files) > 2 and {path.name for path in files} == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in model.parameters())
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert torch.equal(logits(loaded), logits(model))


def test_adapters_that_no_checkpoint_or_vllm_can_hold_are_refused(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    tied = tiny_model("llama", vocab_size=40, pad_token_id=None, tie_word_embeddings=True)
    config = LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"])
    with (
        pytest.warns(UserWarning),
        raises_error("tied_embeddings_adapted"),
    ):
        dict(policy_tensors(get_peft_model(copy.deepcopy(tied), config)))
    dora: Any = get_peft_model(copy.deepcopy(tied), LoraConfig(r=4, target_modules=["q_proj"], use_dora=True))
    with raises_error("adapter_not_mergeable"):
        dict(policy_tensors(dora))
    with raises_error("unsupported_adapter"):
        write_adapter_folder(dora, tmp_path / "a", max_rank=8)
    plain = apply_lora(copy.deepcopy(tied), LoraSettings(lora_r=9))
    with raises_error("lora_rank_too_large"):
        write_adapter_folder(plain, tmp_path / "a", max_rank=8)
    with raises_error("no_adapter"):
        write_adapter_folder(tied, tmp_path / "a", max_rank=8)
    assert not (tmp_path / "a").exists()


def test_an_adapter_folder_holds_the_active_adapter(tmp_path: Path) -> None:
    model = small_model("llama")
    peft_model = with_adapter(model)
    assert write_adapter_folder(peft_model, tmp_path / "a", max_rank=4)
    assert torch.equal(logits(load_adapter(small_model("llama"), tmp_path / "a")), logits(peft_model))
    with peft_model.disable_adapter():
        assert not write_adapter_folder(peft_model, tmp_path / "b", max_rank=4)
    assert not (tmp_path / "b").exists()


def test_weights_that_are_spread_over_processes_are_refused() -> None:
    model = small_model("llama")
    weight: Any = model.get_input_embeddings().weight
    weight.data, weight.ds_id = torch.empty(0), 0  # as DeepSpeed's ZeRO-3 leaves a parameter
    with pytest.raises(ValueError, match="spread over processes"):
        dict(policy_tensors(model))


def test_a_tokenizer_is_saved_beside_the_weights(tmp_path: Path, byte_tokenizer: Any) -> None:
    write_weight_folder(small_model("gpt2"), tmp_path / "m", tokenizer=byte_tokenizer)
    assert (tmp_path / "m" / "tokenizer.json").is_file()
    assert (tmp_path / "m" / "generation_config.json").is_file()
