"""Adapters against peft's own merge on tiny models."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from raises import raises_error
from rlhf_merge.files.checkpoint import open_checkpoint
from rlhf_merge.tensors import Readable


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Let peft warn: of Conv1D, of tied weights, of embeddings it saves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Two layers; q_proj and o_proj are square, the others are not; the output layer is not tied."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return save(transformers.LlamaForCausalLM(config), tmp_path / "llama")


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    """Two layers whose weights are Conv1D, attn.c_proj being square; the output layer is tied."""
    import transformers

    config = transformers.GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return save(transformers.GPT2LMHeadModel(config), tmp_path / "gpt2")


def save(model: Any, folder: Path) -> Path:
    """Fill a model with seeded numbers, biases too, and save it."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.5, generator=generator)
    model.save_pretrained(folder)
    return folder


def load(folder: Path) -> Any:
    """The model of a folder."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def train(base: Path, folder: Path, resize: int | None = None, **settings: Any) -> Path:
    """Save a LoRA of the base in which no parameter is left as it is initialised."""
    import peft

    model = load(base)
    if resize:
        model.resize_token_embeddings(resize)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "lora_alpha": 6, **settings}))
    generator = torch.Generator().manual_seed(len(folder.name))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += torch.empty_like(parameter).normal_(0, 0.3, generator=generator)
    adapted.save_pretrained(str(folder))
    return folder


def merged(base: Path, *adapters: Path) -> dict[str, torch.Tensor]:
    """What peft makes of it, one adapter after the other, without the copies of tied weights."""
    import peft

    model = load(base)
    for adapter in adapters:
        model = peft.PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def whole(tensor: Readable, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """All of a tensor, read at once."""
    out = torch.empty(math.prod(tensor.shape), dtype=dtype)
    tensor.read(0, len(out), out)
    return out.view(tensor.shape)


def check(base: Path, *adapters: Path) -> None:
    """Compare with peft to 1e-6 of the largest value."""
    expected = merged(base, *adapters)
    with open_checkpoint("+".join(map(str, [base, *adapters]))) as ours:
        assert set(ours.tensors) == set(expected)
        for name, value in expected.items():
            assert ours.tensors[name].shape == value.shape, name
            error = (whole(ours.tensors[name]) - value).abs().max()
            assert error <= 1e-6 * value.abs().max(), f"{name}: {error}"


LINEAR = ["q_proj", "k_proj", "down_proj"]
CONV1D = ["c_attn", "c_proj", "c_fc"]
CASES: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": LINEAR},
    "rank-stabilised": {"target_modules": LINEAR, "use_rslora": True},
    "patterns": {
        "target_modules": [*LINEAR, "gate_proj"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "^model.layers.0.mlp.down_proj": 3, "proj": 5},
        "alpha_pattern": {"k_proj": 9, "layers\\.[01]\\.mlp\\.\\w+": 1},
    },
    "dora": {"target_modules": LINEAR, "use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "lm_head", "v_proj"]},
    "embedding, dora": {"target_modules": ["embed_tokens", "v_proj"], "use_dora": True},
    "saved": {"target_modules": LINEAR, "modules_to_save": ["lm_head", "norm", "embed_tokens"]},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_llama_agrees_with_peft(llama: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    check(llama, train(llama, tmp_path / "adapter", **settings))


CONV1D_CASES: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": CONV1D, "fan_in_fan_out": True},
    "dora": {"target_modules": CONV1D, "fan_in_fan_out": True, "use_dora": True},
    "square alone": {"target_modules": ["attn.c_proj"], "fan_in_fan_out": False},
    "bias of all": {"target_modules": CONV1D, "fan_in_fan_out": True, "bias": "all"},
    "bias of the adapted": {"target_modules": CONV1D, "fan_in_fan_out": True, "bias": "lora_only"},
    "bias of B": {"target_modules": CONV1D, "fan_in_fan_out": True, "lora_bias": True},
    "tied embedding": {"target_modules": ["wte"]},
}


@pytest.mark.parametrize("settings", CONV1D_CASES.values(), ids=CONV1D_CASES)
def test_gpt2_agrees_with_peft(gpt2: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    adapter = train(gpt2, tmp_path / "adapter", **settings)
    # So peft leaves it where the last module of all is a Linear.
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fan_in_fan_out": False}))
    check(gpt2, adapter)


def test_two_adapters_one_after_the_other(llama: Path, tmp_path: Path) -> None:
    first = train(llama, tmp_path / "a", target_modules=LINEAR)
    second = train(llama, tmp_path / "second", target_modules=["q_proj", "up_proj"], use_dora=True, r=2)
    check(llama, first, second)


def test_order_of_adapters_matters_with_dora(llama: Path, tmp_path: Path) -> None:
    first = train(llama, tmp_path / "a", target_modules=LINEAR)
    second = train(llama, tmp_path / "second", target_modules=LINEAR, use_dora=True)
    name = "model.layers.0.self_attn.q_proj.weight"
    with (
        open_checkpoint(f"{llama}+{first}+{second}") as one,
        open_checkpoint(f"{llama}+{second}+{first}") as two,
    ):
        assert not torch.allclose(whole(one.tensors[name]), whole(two.tensors[name]), atol=1e-3)


def test_a_vocabulary_that_grew(llama: Path, tmp_path: Path) -> None:
    adapter = train(
        llama,
        tmp_path / "adapter",
        resize=43,
        target_modules=LINEAR,
        modules_to_save=["embed_tokens", "lm_head"],
    )
    held = load_file(adapter / "adapter_model.safetensors")
    with open_checkpoint(f"{llama}+{adapter}") as ours:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert ours.tensors[name].shape == (43, 16)
            assert torch.equal(whole(ours.tensors[name]), held[f"base_model.model.{name}"])


def test_a_vocabulary_that_grew_under_a_lora(llama: Path, tmp_path: Path) -> None:
    """The adapter holds the resized embedding, to which the update is added."""
    import peft

    adapter = train(llama, tmp_path / "adapter", resize=43, target_modules=["embed_tokens", "q_proj"])
    model = load(llama)
    model.resize_token_embeddings(43)
    expected = peft.PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().state_dict()
    with open_checkpoint(f"{llama}+{adapter}") as ours:
        for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"):
            torch.testing.assert_close(whole(ours.tensors[name]), expected[name], rtol=0, atol=1e-6)


def test_an_output_layer_saved_beside_the_embedding_it_is_tied_to(gpt2: Path, tmp_path: Path) -> None:
    adapter = train(gpt2, tmp_path / "adapter", resize=43, target_modules=["c_fc"], fan_in_fan_out=True)
    path = adapter / "adapter_model.safetensors"
    held = load_file(path)
    embedding = torch.arange(43 * 16).reshape(43, 16).float()
    held["base_model.model.transformer.wte.weight"] = embedding
    held["base_model.model.lm_head.weight"] = embedding.clone()
    save_file(held, path)
    with open_checkpoint(f"{gpt2}+{adapter}") as ours:
        assert "lm_head.weight" not in ours.tensors
        assert torch.equal(whole(ours.tensors["transformer.wte.weight"]), embedding)
    held["base_model.model.lm_head.weight"] = embedding + 1
    save_file(held, path)
    with raises_error("unexpected_tensor"):
        open_checkpoint(f"{gpt2}+{adapter}")


def test_a_base_saved_without_its_head(llama: Path, tmp_path: Path) -> None:
    adapter = train(llama, tmp_path / "adapter", target_modules=LINEAR, modules_to_save=["norm"])
    bare = tmp_path / "bare"
    load(llama).model.save_pretrained(bare)
    expected = merged(llama, adapter)
    with open_checkpoint(f"{bare}+{adapter}") as ours:
        for name in ("layers.1.self_attn.q_proj.weight", "norm.weight"):
            torch.testing.assert_close(
                whole(ours.tensors[name]), expected[f"model.{name}"], rtol=0, atol=1e-6
            )


def rewrite(adapter: Path, change: Callable[[str], str]) -> None:
    """Give the adapter's tensors other names."""
    path = adapter / "adapter_model.safetensors"
    save_file({change(name): value for name, value in load_file(path).items()}, path)


def test_other_spellings_of_the_keys(llama: Path, tmp_path: Path) -> None:
    """With the adapter's name in them, as `state_dict()` has them, in a .bin file."""
    adapter = train(
        llama, tmp_path / "adapter", target_modules=LINEAR, modules_to_save=["norm"], use_dora=True
    )
    expected = merged(llama, adapter)

    def spell(name: str) -> str:
        name = re.sub(r"(lora_[AB])\.", r"\1.default.", name).replace(
            ".norm.", ".norm.modules_to_save.default."
        )
        return name + ".default.weight" if name.endswith("vector") else name

    rewrite(adapter, spell)
    path = adapter / "adapter_model.safetensors"
    torch.save(load_file(path), adapter / "adapter_model.bin")
    path.unlink()
    with open_checkpoint(f"{llama}+{adapter}") as ours:
        for name, value in expected.items():
            torch.testing.assert_close(whole(ours.tensors[name]), value, rtol=0, atol=1e-6)


def adapt_by_hand(tmp_path: Path, rows: int, columns: int, *, transposed: bool, dora: bool) -> str:
    """A base with one bfloat16 matrix, and a LoRA of it in bfloat16; the spec of both."""
    torch.manual_seed(5)
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    inputs, outputs = (rows, columns) if transposed else (columns, rows)
    save_file({"h.0.fc.weight": torch.randn(rows, columns).bfloat16()}, base / "model.safetensors")
    parts = {"lora_A.weight": torch.randn(3, inputs), "lora_B.weight": torch.randn(outputs, 3)}
    if dora:
        parts["lora_magnitude_vector"] = torch.rand(outputs) + 1
    save_file(
        {f"base_model.model.h.0.fc.{part}": value.bfloat16() for part, value in parts.items()},
        adapter / "adapter_model.safetensors",
    )
    settings = {"peft_type": "LORA", "r": 3, "lora_alpha": 2, "use_dora": dora}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    return f"{base}+{adapter}"


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_bits_do_not_depend_on_the_cut(tmp_path: Path, transposed: bool, dora: bool) -> None:
    """301 rows of 700 columns are blocks of 93 rows and one of 22."""
    with open_checkpoint(adapt_by_hand(tmp_path, 301, 700, transposed=transposed, dora=dora)) as model:
        tensor = model.tensors["h.0.fc.weight"]
        assert (tensor.row_length, tensor.dtype) == (700, torch.bfloat16)
        expected = whole(tensor)
        for rows in (1, 2, 7, 92, 93, 94, 186, 300):
            out = torch.full((301 * 700,), float("nan"))
            for row in range(0, 301, rows):
                piece = slice(row * 700, min(row + rows, 301) * 700)
                tensor.read(piece.start, piece.stop, out[piece])
            assert torch.equal(out.view(301, 700), expected), rows


def test_computed_in_float32_and_rounded_once(tmp_path: Path) -> None:
    """The bfloat16 result is the float32 one rounded, which is W + 2/3·B·A to float32's precision."""
    spec = adapt_by_hand(tmp_path, 11, 5, transposed=False, dora=False)
    with open_checkpoint(spec) as model:
        tensor = model.tensors["h.0.fc.weight"]
        exact, rounded = whole(tensor), whole(tensor, torch.bfloat16)
    assert torch.equal(exact.bfloat16(), rounded)
    base = load_file(tmp_path / "base" / "model.safetensors")["h.0.fc.weight"].double()
    held = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    a, b = (held[f"base_model.model.h.0.fc.lora_{part}.weight"].double() for part in "AB")
    torch.testing.assert_close(exact.double(), base + 2 / 3 * b @ a, rtol=1e-6, atol=1e-6)
