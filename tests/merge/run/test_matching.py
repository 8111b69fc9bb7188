"""Models whose files name or hold the same tensors differently: prefixes, buffers, tied copies, heads."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from proofs import by_default
from raises import raises_error
from rlhf_merge import ModelMerger
from rlhf_merge.methods.blocks import MemoryTensor
from rlhf_merge.run.matching import is_buffer, matched

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BODY = {EMBEDDING: torch.ones(4, 2), "model.layers.0.w": torch.ones(2)}


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", (4,), True),
        ("transformer.h.1.attn.masked_bias", (), True),
        ("h.1.attn.bias", (1, 1, 8, 8), True),
        ("transformer.h.1.attn.bias", (8,), False),  # a bias, not the mask
        ("model.layers.0.self_attn.q_proj.bias", (8,), False),
        ("bert.embeddings.position_ids", (1, 8), True),
        ("embeddings.token_type_ids", (1, 8), True),
        ("embeddings.token_type_embeddings.weight", (2, 8), False),
    ],
)
def test_buffers(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert is_buffer(name, shape) is expected
    tensors = matched({"a": checkpoint(False, True, {name: torch.zeros(shape)})}).tensors["a"]
    assert (name not in tensors) is expected and EMBEDDING in tensors


def checkpoint(head: bool, tied: bool | None = None, more: dict[str, Tensor] | None = None) -> Any:
    """A model that holds an embedding, perhaps a head, and says whether they are tied."""
    tensors = BODY | ({HEAD: torch.zeros(4, 2)} if head else {}) | (more or {})
    config = {} if tied is None else {"tie_word_embeddings": tied}
    return SimpleNamespace(tensors={k: MemoryTensor(t) for k, t in tensors.items()}, config=config)


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
def test_heads(first: Any, second: Any, heads: tuple[str, str], tied: bool | None) -> None:
    found = matched({"a": first, "b": second})
    assert found.tied is tied and found.named_by is None
    for spec, model, head in zip("ab", (first, second), heads, strict=True):
        expected = {"": None, "own": model.tensors.get(HEAD), "embedding": model.tensors[EMBEDDING]}[head]
        assert found.tensors[spec].get(HEAD) is expected and EMBEDDING in found.tensors[spec]


def test_a_model_with_neither_head_nor_embedding() -> None:
    broken = SimpleNamespace(tensors={"w": MemoryTensor(torch.zeros(2))}, config={})
    with raises_error("missing_tensor", tensor=HEAD, model="b"):
        matched({"a": checkpoint(True, False), "b": broken})  # type: ignore[dict-item]


def library_model(kind: str) -> tuple[Any, Any, dict[str, Any]]:
    """A tiny model of transformers: class, config, and the config.json it saves."""
    import transformers as t

    small = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    small |= {"intermediate_size": 12, "max_position_embeddings": 16}
    gpt2 = {"vocab_size": 16, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    t5 = {"vocab_size": 16, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2}
    made, configs, values = {
        "gpt2": (t.GPT2LMHeadModel, t.GPT2Config, gpt2),
        "t5": (t.T5ForConditionalGeneration, t.T5Config, t5),
        "bert": (t.BertForMaskedLM, t.BertConfig, small),
        "llama": (
            t.LlamaForCausalLM,
            t.LlamaConfig,
            small | {"num_key_value_heads": 1, "tie_word_embeddings": True},
        ),
    }[kind]
    config: Any = configs(**values)
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
        copies = {"cls.predictions.decoder.weight": state["bert.embeddings.word_embeddings.weight"]}
        copies |= {"cls.predictions.decoder.bias": state["cls.predictions.bias"]}
        return state | copies | {"bert.embeddings.position_ids": torch.arange(16)[None]}
    return {name.removeprefix("model."): tensor for name, tensor in state.items() if name != HEAD}


def loads_cleanly(model_class: Any, folder: Path) -> Any:
    """The model of a folder, in which the library misses nothing and finds nothing unexpected."""
    loaded, info = model_class.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return loaded


@pytest.mark.parametrize("method", by_default(["linear", "task_arithmetic"], "linear"))
@pytest.mark.parametrize("kind", ["gpt2", "t5", "bert", "llama"])
def test_a_base_of_the_hub_and_fine_tunes_that_the_library_saved(
    workshop: Any, kind: str, method: str
) -> None:
    """The result is plain arithmetic on what the library loads, and the library loads it cleanly."""
    made, config, plain = library_model(kind)
    states = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = made(config)
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        if seed:
            model.save_pretrained(workshop.root / f"tune{seed}")
    old = {k: t.clone().contiguous() for k, t in as_the_hub_has_it(kind, states[0]).items()}
    plain |= {"architectures": ["LlamaModel"]} if kind == "llama" else {}
    base = workshop.save("base", old, whole_config=plain)
    models = [str(workshop.root / "tune1"), str(workshop.root / "tune2")]
    values: dict[str, Any] = {"method": method, "base": base, "models": models}
    if method == "linear":
        values = {"method": method, "models": [base, *models]}
    ModelMerger(values).merge(workshop.root / "out")
    for name, tensor in loads_cleanly(made, workshop.root / "out").state_dict().items():
        start, first, second = (state[name] for state in states)
        if tensor.is_floating_point():
            expected = (start + first + second) / 3 if method == "linear" else first + second - start
            torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-6)
    written = json.loads((workshop.root / "out" / "config.json").read_text())
    assert written["architectures"] == [made.__name__]


def test_names_are_brought_to_those_with_the_prefix(workshop: Any) -> None:
    body = {
        "layers.0.w": torch.ones(2),
        "embed_tokens.weight": torch.ones(4, 2),
        "norm.weight": torch.ones(2),
    }
    short = workshop.save("a", body)
    long = workshop.save("b", {f"model.{name}": 3 * tensor for name, tensor in body.items()})
    ModelMerger({"method": "linear", "models": [short, long]}).merge(workshop.root / "out")
    merged = workshop.load(workshop.root / "out")
    assert set(merged) == {f"model.{name}" for name in body}
    assert all(bool((tensor == 2).all()) for tensor in merged.values())


def test_what_looks_like_a_copy_and_is_none_is_kept(workshop: Any) -> None:
    """decoder.embed_tokens differs from shared: it is a weight of its own, and its lack is an error.

    Of equal heads that all models have, nothing says that they are tied: without them a model of an untied
    architecture would lose its head.
    """
    shared, own = (
        {"shared.weight": torch.ones(4, 2), "encoder.block.0.w": torch.ones(2)},
        "decoder.embed_tokens.weight",
    )
    one, two = workshop.save("a", shared | {own: torch.zeros(4, 2)}), workshop.save("b", shared)
    with raises_error("missing_tensor", tensor=own):
        ModelMerger({"method": "linear", "models": [one, two]}).merge(workshop.root / "out")
    ModelMerger({"method": "linear", "models": [one, one]}).merge(workshop.root / "out")
    assert own in workshop.load(workshop.root / "out")
    heads = checkpoint(True)
    heads.tensors[HEAD] = heads.tensors[EMBEDDING]
    assert HEAD in matched({"a": heads, "b": heads}).tensors["a"]


def test_tensors_that_only_some_models_have_are_left_out_when_asked(workshop: Any) -> None:
    plain = workshop.save("a", BODY)
    valued = workshop.save("b", BODY | {"v_head.summary.weight": torch.ones(1, 2)})
    values = {"method": "linear", "models": [plain, valued]}
    with raises_error("missing_tensor", tensor="v_head.summary.weight"):
        ModelMerger(values).merge(workshop.root / "out")
    merger = ModelMerger(values | {"ignore": "v_head.*"})
    plan = merger.plan()
    assert plan.ignored == ("v_head.summary.weight",)
    merger.merge(workshop.root / "out", plan=plan)
    assert set(workshop.load(workshop.root / "out")) == set(BODY)
    # The recipe in the result says it, too.
    assert ModelMerger(workshop.root / "out" / "merge_config.yaml").config.ignore == ("v_head.*",)


@pytest.mark.parametrize(
    ("pattern", "code", "fields"),
    [
        ("*", "ignored_common_tensor", {}),
        ("model.layers.0.*", "ignored_common_tensor", {"tensor": "model.layers.0.w"}),
        ("*embed*", "ignored_common_tensor", {"tensor": EMBEDDING}),
        ("vhead.*", "unmatched_pattern", {"pattern": "vhead.*"}),
    ],
)
def test_patterns_that_fit_too_much_or_nothing(pattern: str, code: str, fields: dict[str, str]) -> None:
    models = {"a": checkpoint(False), "b": checkpoint(False, more={"v_head.w": torch.ones(1)})}
    with raises_error(code, **fields):
        matched(models, ["v_head.*", pattern])


def test_the_text_of_a_model_of_text_and_images_is_cut(workshop: Any) -> None:
    """CLIP, text layers 0, 1, 1: the library loads it cleanly, and the images' layers are as they were."""
    import transformers as t

    part = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
    config = t.CLIPConfig(
        text_config=part | {"vocab_size": 16, "max_position_embeddings": 8},
        vision_config=part | {"image_size": 8, "patch_size": 4},
        projection_dim=4,
    )
    torch.manual_seed(0)
    model, path = t.CLIPModel(config), str(workshop.root / "a")
    model.save_pretrained(path)
    slices = [{"sources": [{"model": path, "layers": layers}]} for layers in ([0, 2], [1, 2])]
    merger = ModelMerger({"method": "passthrough", "slices": slices, "stack": "text"})
    merger.merge(workshop.root / "out")
    before, after = model.state_dict(), loads_cleanly(t.CLIPModel, workshop.root / "out").state_dict()
    assert len(after) == len(before) + sum("text_model.encoder.layers.1." in name for name in before)
    for name, tensor in after.items():
        source = name.replace("layers.2", "layers.1") if name.startswith("text_model") else name
        assert torch.equal(tensor, before[source]), name
