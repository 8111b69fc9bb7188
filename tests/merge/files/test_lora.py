"""Adapters against peft's own merge on tiny models, and those that are refused."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from proofs import by_default
from raises import raises_error
from rlhf_merge.files.checkpoint import open_checkpoint
from rlhf_merge.methods.blocks import Readable


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

    sizes: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
    }
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
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


def load(folder: Path, resize: int | None = None) -> Any:
    """The model of a folder, perhaps with another number of tokens."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    if resize:
        model.resize_token_embeddings(resize)
    return model


def train(base: Path, folder: Path, resize: int | None = None, **settings: Any) -> Path:
    """Save a LoRA of the base in which no parameter is left as it is initialised."""
    import peft

    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, **settings})
    adapted = peft.get_peft_model(load(base, resize), config)
    generator = torch.Generator().manual_seed(len(folder.name))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += torch.empty_like(parameter).normal_(0, 0.3, generator=generator)
    adapted.save_pretrained(str(folder))
    return folder


def merged(base: Path, *adapters: Path, resize: int | None = None) -> dict[str, Tensor]:
    """What peft makes of it, one adapter after the other, without the copies of tied weights."""
    import peft

    model = load(base, resize)
    for adapter in adapters:
        model = peft.PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def whole(tensor: Readable, dtype: torch.dtype = torch.float32) -> Tensor:
    """All of a tensor, read at once."""
    out = torch.empty(math.prod(tensor.shape), dtype=dtype)
    tensor.read(0, len(out), out)
    return out.view(tensor.shape)


def check(expected: dict[str, Tensor], base: Path, *adapters: Path, prefix: str = "") -> None:
    """Compare with peft to 1e-6 of the largest value; the base's names may lack a prefix."""
    with open_checkpoint("+".join(map(str, [base, *adapters]))) as ours:
        assert {prefix + name for name in ours.tensors} == set(expected)
        for name, tensor in ours.tensors.items():
            value = expected[prefix + name]
            assert tensor.shape == value.shape, name
            error = (whole(tensor) - value).abs().max()
            assert error <= 1e-6 * value.abs().max(), f"{name}: {error}"


LINEAR = ["q_proj", "k_proj", "down_proj"]
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


@pytest.mark.parametrize(
    "settings",
    by_default(CASES.values(), CASES["patterns"], CASES["embedding, dora"], CASES["saved"]),
    ids=CASES,
)
def test_llama_agrees_with_peft(llama: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    adapter = train(llama, tmp_path / "adapter", **settings)
    check(merged(llama, adapter), llama, adapter)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": LINEAR, "modules_to_save": ["embed_tokens", "lm_head"]},
        # The adapter holds the resized embedding, to which its LoRA is added, and no output layer.
        {"target_modules": ["embed_tokens", "q_proj"]},
    ],
)
def test_a_vocabulary_that_grew(llama: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    adapter = train(llama, tmp_path / "adapter", resize=43, **settings)
    expected = merged(llama, adapter, resize=43)
    if "modules_to_save" not in settings:
        expected["lm_head.weight"] = load(llama).lm_head.weight.data
    check(expected, llama, adapter)


CONV1D = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
CONV1D_CASES: dict[str, dict[str, Any]] = {
    "plain": CONV1D,
    "dora": CONV1D | {"use_dora": True},
    "square alone": {"target_modules": ["attn.c_proj"], "fan_in_fan_out": False},
    "bias of all": CONV1D | {"bias": "all"},
    "bias of the adapted": CONV1D | {"bias": "lora_only"},
    "bias of B": CONV1D | {"lora_bias": True},
    "tied embedding": {"target_modules": ["wte"]},
}


@pytest.mark.parametrize(
    "settings",
    by_default(
        CONV1D_CASES.values(),
        CONV1D_CASES["dora"],
        CONV1D_CASES["bias of all"],
        CONV1D_CASES["tied embedding"],
    ),
    ids=CONV1D_CASES,
)
def test_gpt2_agrees_with_peft(gpt2: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    adapter = train(gpt2, tmp_path / "adapter", **settings)
    # So peft leaves it where the last module of all is a Linear.
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fan_in_fan_out": False}))
    check(merged(gpt2, adapter), gpt2, adapter)


def test_two_adapters_one_after_the_other(llama: Path, tmp_path: Path) -> None:
    """With DoRA the order matters."""
    first = train(llama, tmp_path / "a", target_modules=LINEAR)
    second = train(llama, tmp_path / "second", target_modules=["q_proj", "up_proj"], use_dora=True, r=2)
    expected, turned = merged(llama, first, second), merged(llama, second, first)
    check(expected, llama, first, second)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.allclose(expected[name], turned[name], atol=1e-3)


def test_an_output_layer_saved_beside_the_embedding_it_is_tied_to(gpt2: Path, tmp_path: Path) -> None:
    adapter = train(gpt2, tmp_path / "adapter", resize=43, target_modules=["c_fc"], fan_in_fan_out=True)
    path = adapter / "adapter_model.safetensors"
    embedding = torch.arange(43 * 16).reshape(43, 16).float()
    held = load_file(path) | {"base_model.model.transformer.wte.weight": embedding}
    save_file(held | {"base_model.model.lm_head.weight": embedding.clone()}, path)
    with open_checkpoint(f"{gpt2}+{adapter}") as ours:
        assert "lm_head.weight" not in ours.tensors
        assert torch.equal(whole(ours.tensors["transformer.wte.weight"]), embedding)
    save_file(held | {"base_model.model.lm_head.weight": embedding + 1}, path)
    with raises_error("unexpected_tensor"):
        open_checkpoint(f"{gpt2}+{adapter}")


def test_a_base_saved_without_its_head(llama: Path, tmp_path: Path) -> None:
    adapter = train(llama, tmp_path / "adapter", target_modules=LINEAR, modules_to_save=["norm"])
    load(llama).model.save_pretrained(tmp_path / "bare")
    expected = {name: value for name, value in merged(llama, adapter).items() if name != "lm_head.weight"}
    check(expected, tmp_path / "bare", adapter, prefix="model.")


def test_other_spellings_of_the_keys(llama: Path, tmp_path: Path) -> None:
    """With the adapter's name in them, as `state_dict()` has them, in a .bin file."""
    settings = {"target_modules": LINEAR, "modules_to_save": ["norm"], "use_dora": True}
    adapter = train(llama, tmp_path / "adapter", **settings)
    expected = merged(llama, adapter)

    def spelled(name: str) -> str:
        name = re.sub(r"(lora_[AB])\.", r"\1.default.", name)
        name = name.replace(".norm.", ".norm.modules_to_save.default.")
        return name + ".default.weight" if name.endswith("vector") else name

    path = adapter / "adapter_model.safetensors"
    held = {spelled(name): value for name, value in load_file(path).items()}
    key = (
        "base_model.model.model.norm.original_module.weight"  # the base's, which peft keeps and does not use
    )
    torch.save(held | {key: torch.ones(1)}, adapter / "adapter_model.bin")
    path.unlink()
    check(expected, llama, adapter)


def by_hand(workshop: Any, rows: int, columns: int, *, transposed: bool, dora: bool) -> str:
    """A base with one bfloat16 matrix, and a LoRA of it in bfloat16; the spec of both."""
    torch.manual_seed(5)
    inputs, outputs = (rows, columns) if transposed else (columns, rows)
    base = workshop.save("base", {"h.0.fc.weight": torch.randn(rows, columns).bfloat16()})
    parts = {"lora_A.weight": torch.randn(3, inputs), "lora_B.weight": torch.randn(outputs, 3)}
    parts |= {"lora_magnitude_vector": torch.rand(outputs) + 1} if dora else {}
    held = {f"h.0.fc.{part}": value.bfloat16() for part, value in parts.items()}
    return f"{base}+{workshop.adapter('adapter', held, r=3, use_dora=dora)}"


@pytest.mark.parametrize("dora", by_default([False, True], True))
@pytest.mark.parametrize("transposed", [False, True])
def test_bits_do_not_depend_on_the_cut(workshop: Any, transposed: bool, dora: bool) -> None:
    """301 rows of 700 columns are blocks of 93 rows and one of 22."""
    with open_checkpoint(by_hand(workshop, 301, 700, transposed=transposed, dora=dora)) as model:
        tensor = model.tensors["h.0.fc.weight"]
        assert (tensor.row_length, tensor.dtype) == (700, torch.bfloat16)
        expected = whole(tensor)
        for rows in (1, 2, 7, 92, 93, 94, 186, 300):
            out = torch.full((301 * 700,), float("nan"))
            for row in range(0, 301, rows):
                piece = slice(row * 700, min(row + rows, 301) * 700)
                tensor.read(piece.start, piece.stop, out[piece])
            assert torch.equal(out.view(301, 700), expected), rows


def test_computed_in_float32_and_rounded_once(workshop: Any) -> None:
    """The bfloat16 result is the float32 one rounded, which is W + 2/3·B·A to float32's precision."""
    with open_checkpoint(by_hand(workshop, 11, 5, transposed=False, dora=False)) as model:
        tensor = model.tensors["h.0.fc.weight"]
        exact, rounded = whole(tensor), whole(tensor, torch.bfloat16)
    assert torch.equal(exact.bfloat16(), rounded)
    base = workshop.load(workshop.root / "base")["h.0.fc.weight"].double()
    held = workshop.load(workshop.root / "adapter")
    a, b = (held[f"base_model.model.h.0.fc.lora_{part}.weight"].double() for part in "AB")
    torch.testing.assert_close(exact.double(), base + 2 / 3 * b @ a, rtol=1e-6, atol=1e-6)


A, B = "fc.lora_A.weight", "fc.lora_B.weight"
MAGNITUDE = "fc.lora_magnitude_vector"


@pytest.mark.parametrize(
    ("config", "changes", "code"),
    [
        ({"peft_type": "IA3"}, {}, "unsupported_adapter"),
        ({"peft_type": None}, {}, "unsupported_adapter"),
        ({"alora_invocation_tokens": [1]}, {}, "unsupported_adapter"),
        ({"target_parameters": ["experts.down_proj"]}, {}, "unsupported_adapter"),
        ({"trainable_token_indices": [3]}, {}, "unsupported_adapter"),
        ({"init_lora_weights": "pissa_niter_4"}, {}, "unsupported_adapter"),
        ({"r": 3}, {}, "damaged_file"),
        ({"lora_alpha": "much"}, {}, "damaged_file"),
        ({"alpha_pattern": {"(": 1}}, {}, "damaged_file"),
        ({"use_dora": True}, {}, "damaged_file"),
        ({"use_dora": True}, {MAGNITUDE: torch.ones(6)}, "damaged_file"),  # of four outputs
        ({}, {MAGNITUDE: torch.ones(4)}, "damaged_file"),
        ({}, {A: None}, "damaged_file"),
        ({}, {A: torch.ones(0)}, "damaged_file"),
        ({}, {A: None, B: None}, "damaged_file"),
        ({}, {"fc.lora_A.other.weight": torch.ones(2, 6)}, "damaged_file"),
        ({}, {A: torch.ones(2, 5)}, "different_shapes"),
        ({}, {"fc.base_layer.weight": torch.ones(5, 6)}, "different_shapes"),
        ({}, {f"conv.lora_{part}.weight": torch.ones(2, 2) for part in "AB"}, "different_shapes"),
        ({}, {"fc.lora_B.bias": torch.ones(4)}, "missing_base_weight"),
        ({}, {A.replace("fc", "gate"): torch.ones(2, 6), B.replace("fc", "gate"): torch.ones(4, 2)},
            "missing_base_weight"),
        ({}, {"fc.token_adapter": torch.ones(4)}, "unexpected_tensor"),
    ],
)  # fmt: skip
def test_refused(workshop: Any, config: dict[str, Any], changes: dict[str, Any], code: str) -> None:
    """An adapter of a 4 x 6 `fc` that is changed in its config or its tensors."""
    base = {f"h.{layer}.fc.weight": torch.zeros(4, 6) for layer in (0, 1)}
    path = workshop.save("base", base | {"h.0.conv.weight": torch.zeros(2, 2, 3)})
    held = {A: torch.ones(2, 6), B: torch.ones(4, 2)} | changes
    kept = {f"h.0.{key}": value for key, value in held.items() if value is not None}
    with raises_error(code):
        open_checkpoint(f"{path}+{workshop.adapter('adapter', kept, **config)}")


def test_a_tensor_that_is_adapted_twice(workshop: Any) -> None:
    path = workshop.save("base", {"model.h.0.fc.weight": torch.zeros(4, 6)})
    parts = {f"{start}h.0.{A}": torch.ones(2, 6) for start in ("", "model.")}
    parts |= {f"{start}h.0.{B}": torch.ones(4, 2) for start in ("", "model.")}
    with raises_error("damaged_file"):
        open_checkpoint(f"{path}+{workshop.adapter('adapter', parts)}")


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (["text.h.0.fc.weight", "vision.h.0.fc.weight"], "ambiguous_tensor"),  # both end alike
        (["h.5.fc.weight"], "missing_base_weight"),  # no other ends with fc.weight, but the layer is another
    ],
)
def test_bases_in_which_a_name_is_not_found(workshop: Any, names: list[str], code: str) -> None:
    base = workshop.save("base", {name: torch.zeros(4, 6) for name in names})
    adapter = workshop.adapter("adapter", {f"h.0.{A}": torch.ones(2, 6), f"h.0.{B}": torch.ones(4, 2)})
    with raises_error(code):
        open_checkpoint(f"{base}+{adapter}")
