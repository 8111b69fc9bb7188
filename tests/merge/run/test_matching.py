"""Models whose files name or hold the same tensors differently: prefixes, buffers, tied copies, heads."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from raises import raises_error
from rlhf_merge import ModelMerger
from rlhf_merge.methods.blocks import MemoryTensor
from rlhf_merge.run.matching import is_buffer, matched

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", (4,), True),
        ("transformer.h.1.attn.masked_bias", (), True),
        ("h.1.attn.bias", (1, 1, 8, 8), True),
        ("transformer.h.1.attn.bias", (8,), False),  # a bias, not the mask
        ("model.layers.0.self_attn.q_proj.bias", (8,), False),
        ("model.layers.0.mlp.down_proj.weight", (8, 8), False),
        ("bert.embeddings.position_ids", (1, 8), True),
        ("embeddings.token_type_ids", (1, 8), True),
        ("embeddings.token_type_embeddings.weight", (2, 8), False),
    ],
)
def test_buffers(name: str, shape: tuple[int, ...], expected: bool):
    assert is_buffer(name, shape) is expected


def checkpoint(head: bool, tied: bool | None = None, **more: torch.Tensor) -> Any:
    """A model that holds an embedding, perhaps a head, and says whether they are tied."""
    tensors = {EMBEDDING: torch.zeros(4, 2), "model.layers.0.w": torch.zeros(2)}
    tensors |= {HEAD: torch.ones(4, 2)} if head else {}
    config = {} if tied is None else {"tie_word_embeddings": tied}
    stored = {name: MemoryTensor(tensor) for name, tensor in (tensors | more).items()}
    return SimpleNamespace(tensors=stored, config=config)


@pytest.mark.parametrize(
    ("first", "second", "heads", "tied"),
    [
        # None has a head, or the one that was saved is the embedding once more.
        (checkpoint(False, True), checkpoint(False, True), ("", ""), None),
        (checkpoint(True, True), checkpoint(False, True), ("", ""), None),
        (checkpoint(False), checkpoint(True, True), ("", ""), None),
        # All have one.
        (checkpoint(True, False), checkpoint(True), ("own", "own"), None),
        # One of them has: the other lends its embedding, and the result is untied.
        (checkpoint(True, False), checkpoint(False, True), ("own", "embedding"), False),
        (checkpoint(False), checkpoint(True), ("embedding", "own"), False),
        (checkpoint(True, True), checkpoint(True, False), ("embedding", "own"), False),
    ],
)
def test_heads(first: Any, second: Any, heads: tuple[str, str], tied: bool | None):
    found = matched({"a": first, "b": second})
    tensors = found.tensors
    assert found.tied is tied and found.named_by is None
    for spec, model, head in zip("ab", (first, second), heads, strict=True):
        expected = {"": None, "own": model.tensors.get(HEAD), "embedding": model.tensors[EMBEDDING]}[head]
        assert tensors[spec].get(HEAD) is expected
        assert EMBEDDING in tensors[spec]


def test_a_model_with_neither_head_nor_embedding():
    broken = SimpleNamespace(tensors={"w": MemoryTensor(torch.zeros(2))}, config={})
    with raises_error("missing_tensor", tensor="lm_head.weight", model="b"):
        matched({"a": checkpoint(True, False), "b": broken})  # type: ignore[dict-item]


def test_buffers_are_left_out():
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors = matched({"a": checkpoint(False, True, **{name: torch.zeros(2)})}).tensors
    assert name not in tensors["a"] and EMBEDDING in tensors["a"]


def save(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> str:
    folder.mkdir()
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def library_model(kind: str) -> tuple[Any, Any, dict[str, Any]]:
    """A tiny model of transformers: class, config, and the config.json it saves."""
    import transformers as t

    small: dict[str, Any] = {
        "vocab_size": 16,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    small |= {"num_attention_heads": 2, "intermediate_size": 12, "max_position_embeddings": 16}
    makers: dict[str, Any] = {
        "gpt2": lambda: (
            t.GPT2LMHeadModel,
            t.GPT2Config(vocab_size=16, n_embd=8, n_layer=2, n_head=2, n_positions=16),
        ),
        "t5": lambda: (
            t.T5ForConditionalGeneration,
            t.T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2),
        ),
        "bert": lambda: (t.BertForMaskedLM, t.BertConfig(**small)),
        "llama": lambda: (
            t.LlamaForCausalLM,
            t.LlamaConfig(**small, num_key_value_heads=1, tie_word_embeddings=True),
        ),
    }
    made, config = makers[kind]()
    return made, config, config.to_dict() | {"architectures": [made.__name__]}


def as_the_hub_has_it(kind: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The base as old checkpoints of the hub hold it: other prefix, buffers, copies of tied weights."""
    if kind == "gpt2":
        found = {name.removeprefix("transformer."): tensor for name, tensor in state.items() if name != HEAD}
        masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 16, 16).tril() for i in range(2)}
        return found | masks | {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
    if kind == "t5":
        copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", HEAD)
        return state | {name: state["shared.weight"] for name in copies}
    if kind == "bert":
        embedding = state["bert.embeddings.word_embeddings.weight"]
        copies = {"cls.predictions.decoder.weight": embedding}
        copies |= {"cls.predictions.decoder.bias": state["cls.predictions.bias"]}
        return state | copies | {"bert.embeddings.position_ids": torch.arange(16)[None]}
    return {name.removeprefix("model."): tensor for name, tensor in state.items() if name != HEAD}


@pytest.mark.parametrize("method", ["linear", "task_arithmetic"])
@pytest.mark.parametrize("kind", ["gpt2", "t5", "bert", "llama"])
def test_a_base_of_the_hub_and_fine_tunes_that_the_library_saved(tmp_path: Path, kind: str, method: str):
    """The result is plain arithmetic on what the library loads, and the library loads it cleanly."""
    made, config, plain = library_model(kind)
    states = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = made(config)
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        if seed:
            model.save_pretrained(tmp_path / f"tune{seed}")
        else:
            known = {k: v for k, v in states[0].items() if k in model.state_dict()}
            save_hub = as_the_hub_has_it(kind, known)
            base = plain if kind != "llama" else plain | {"architectures": ["LlamaModel"]}
            save(tmp_path / "base", save_hub, base)
    models = [str(tmp_path / "tune1"), str(tmp_path / "tune2")]
    values: dict[str, Any] = {"method": method, "base": str(tmp_path / "base"), "models": models}
    if method == "linear":
        values = {"method": method, "models": [str(tmp_path / "base"), *models]}
    ModelMerger(values).merge(tmp_path / "out")
    loaded, info = made.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, tensor in loaded.state_dict().items():
        base, first, second = (state[name] for state in states)
        if not tensor.is_floating_point():
            continue
        expected = (base + first + second) / 3 if method == "linear" else first + second - base
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-6)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == [made.__name__]


def test_names_are_brought_to_those_with_the_prefix(tmp_path: Path):
    body = {
        "layers.0.w": torch.ones(2),
        "embed_tokens.weight": torch.ones(4, 2),
        "norm.weight": torch.ones(2),
    }
    short = save(tmp_path / "a", body, {})
    long = save(tmp_path / "b", {f"model.{name}": 3 * tensor for name, tensor in body.items()}, {})
    ModelMerger({"method": "linear", "models": [short, long]}).merge(tmp_path / "out")
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert set(merged) == {f"model.{name}" for name in body}
    assert all(bool((tensor == 2).all()) for tensor in merged.values())


def test_a_copy_that_is_none_is_kept(tmp_path: Path):
    """decoder.embed_tokens differs from shared: it is a weight of its own, and its lack is an error."""
    shared = {"shared.weight": torch.ones(4, 2), "encoder.block.0.w": torch.ones(2)}
    one = save(tmp_path / "a", shared | {"decoder.embed_tokens.weight": torch.zeros(4, 2)}, {})
    two = save(tmp_path / "b", shared, {})
    with raises_error("missing_tensor", tensor="decoder.embed_tokens.weight"):
        ModelMerger({"method": "linear", "models": [one, two]}).merge(tmp_path / "out")
    ModelMerger({"method": "linear", "models": [one, one]}).merge(tmp_path / "out")
    assert "decoder.embed_tokens.weight" in load_file(tmp_path / "out" / "model.safetensors")


def test_equal_heads_that_all_models_have_are_kept(tmp_path: Path):
    """Nothing says that they are tied: without them a model of an untied architecture would lose its head."""
    state = {EMBEDDING: torch.ones(4, 2), HEAD: torch.ones(4, 2), "model.layers.0.w": torch.ones(2)}
    specs = [save(tmp_path / name, state, {}) for name in "ab"]
    ModelMerger({"method": "linear", "models": specs}).merge(tmp_path / "out")
    assert HEAD in load_file(tmp_path / "out" / "model.safetensors")


def test_tensors_that_only_some_models_have_are_left_out_when_asked(tmp_path: Path):
    state = {EMBEDDING: torch.ones(4, 2), "model.layers.0.w": torch.ones(2)}
    plain = save(tmp_path / "a", state, {})
    valued = save(tmp_path / "b", state | {"v_head.summary.weight": torch.ones(1, 2)}, {})
    values = {"method": "linear", "models": [plain, valued]}
    with raises_error("missing_tensor", tensor="v_head.summary.weight"):
        ModelMerger(values).merge(tmp_path / "out")
    merger = ModelMerger(values | {"ignore": "v_head.*"})
    plan = merger.plan()
    assert plan.ignored == ("v_head.summary.weight",)
    merger.merge(tmp_path / "out", plan=plan)
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(state)
    # The recipe in the result says it, too.
    assert ModelMerger(tmp_path / "out" / "merge_config.yaml").config.ignore == ("v_head.*",)


@pytest.mark.parametrize(
    ("value", "key"), [(5, "ignore"), ([5], "ignore[0]"), ([""], "ignore[0]"), ({"a": 1}, "ignore")]
)
def test_patterns_that_are_none(value: Any, key: str):
    with raises_error("invalid_value", key=key):
        ModelMerger({"method": "linear", "models": ["a"], "ignore": value})


def test_state_dicts_without_what_is_ignored():
    states = {"a": {"w": torch.ones(2)}, "b": {"w": torch.ones(2), "v_head.w": torch.ones(1)}}
    merger = ModelMerger({"method": "linear", "models": ["a", "b"], "ignore": ["v_head.*"]})
    assert list(merger.merge_state_dicts(states)) == ["w"]


def test_the_text_of_a_model_of_text_and_images_is_cut(tmp_path: Path):
    """CLIP, text layers 0, 1, 1: the library loads it cleanly, and the images' layers are as they were."""
    import transformers as t

    part = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
    config = t.CLIPConfig(
        text_config=part | {"vocab_size": 16, "max_position_embeddings": 8},
        vision_config=part | {"image_size": 8, "patch_size": 4},
        projection_dim=4,
    )
    torch.manual_seed(0)
    model = t.CLIPModel(config)
    model.save_pretrained(tmp_path / "a")
    slices = [{"sources": [{"model": str(tmp_path / "a"), "layers": layers}]} for layers in ([0, 2], [1, 2])]
    ModelMerger({"method": "passthrough", "slices": slices, "stack": "text"}).merge(tmp_path / "out")
    found: Any = t.CLIPModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    loaded, info = found
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    before, after = model.state_dict(), loaded.state_dict()
    assert len(after) == len(before) + sum("text_model.encoder.layers.1." in name for name in before)
    for name, tensor in after.items():
        source = name.replace("layers.2", "layers.1") if name.startswith("text_model") else name
        assert torch.equal(tensor, before[source]), name
