"""What `inspect_model` finds in tiny models, and how it is shown."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from raises import raises_error
from rlhf_merge.compare.inspect import ModelSummary, Statistics, inspect_model, render_summary, summary_json
from rlhf_merge.methods import blocks

NAN, INF = math.nan, math.inf


def one(workshop: Any, tensor: Tensor) -> Statistics:
    """The statistics of a model that is one tensor."""
    (summary,) = inspect_model(workshop.save("one", {"x": tensor})).tensors
    assert (summary.name, summary.shape) == ("x", tuple(tensor.shape))
    assert summary.dtype == str(tensor.dtype).removeprefix("torch.")
    assert summary.nbytes == tensor.nbytes
    return summary.statistics


def shown(summary: ModelSummary, width: int = 80, **options: Any) -> str:
    """What a terminal of some width shows."""
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(render_summary(summary, **options))
    return capture.get()


def test_statistics_of_four_numbers(workshop: Any) -> None:
    # 1, -2, 0, 3: Σx² = 14, mean 1/2, Σ(x - 1/2)² = (1 + 25 + 1 + 25)/4 = 13, so the variance is 13/4
    found = one(workshop, torch.tensor([[1.0, -2.0], [0.0, 3.0]]))
    assert found.norm == pytest.approx(math.sqrt(14), rel=1e-12)
    assert found.mean == 0.5 and found.std == pytest.approx(math.sqrt(13 / 4), rel=1e-12)
    assert (found.least, found.largest, found.zeros, found.nan, found.inf) == (0, 3, 1, 0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_blocks_add_up_to_the_whole(
    workshop: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 7)
    tensor = (3 + 0.1 * torch.randn(50, generator=torch.Generator().manual_seed(0))).to(dtype)
    found, exact = one(workshop, tensor), tensor.double()
    assert found.norm == pytest.approx(float(exact.norm()), rel=1e-6)
    assert found.mean == pytest.approx(float(exact.mean()), rel=1e-6)
    assert found.std == pytest.approx(float(exact.std(correction=0)), rel=1e-5)
    assert (found.least, found.largest) == (float(exact.abs().min()), float(exact.abs().max()))


def test_nan_and_infinities_are_counted_and_left_out(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 3)
    found = one(workshop, torch.tensor([1.0, NAN, -3.0, INF, -INF, NAN, 2.0, 0.0]))
    assert (found.nan, found.inf, found.zeros, found.count) == (2, 2, 1, 4)
    assert (found.mean, found.least, found.largest) == (0, 0, 3)
    assert found.norm == pytest.approx(math.sqrt(14), rel=1e-12)


@pytest.mark.parametrize("tensor", [torch.full((2,), NAN), torch.empty(0, 3)])
def test_a_tensor_without_finite_elements_has_no_mean(workshop: Any, tensor: Tensor) -> None:
    found = one(workshop, tensor)
    assert not any(map(math.isfinite, (found.mean, found.std, found.least, found.largest)))
    assert (found.norm, found.nan) == (0, tensor.numel())


def test_numbers_whose_sums_float32_cannot_hold(workshop: Any) -> None:
    found = one(workshop, torch.tensor([3e38, 3e38, -1e30]))
    assert (found.nan, found.inf) == (0, 0)
    assert found.norm == pytest.approx(3e38 * math.sqrt(2), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int32, torch.bool])
def test_integers(workshop: Any, dtype: torch.dtype) -> None:
    found = one(workshop, torch.tensor([0, 3, 4]).to(dtype))
    of_bool = dtype == torch.bool
    assert (found.norm, found.largest, found.zeros) == (
        math.sqrt(2) if of_bool else 5,
        1 if of_bool else 4,
        1,
    )


def test_totals_of_a_model(workshop: Any) -> None:
    tensors = workshop.tensors()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    spec = workshop.save("model", tensors, shards=2)
    read: list[int] = []
    totals: list[int] = []

    def begin(total: int) -> blocks.OnBytes:
        totals.append(total)
        return read.append

    found = inspect_model(spec, threads=1, begin=begin)
    assert totals == [sum(read)] == [found.nbytes] and found == inspect_model(spec, threads=4)
    with raises_error("invalid_value", key="threads"):
        inspect_model(spec, threads=0)
    count = sum(tensor.numel() for tensor in tensors.values())
    assert (found.spec, found.architecture, found.layers) == (spec, "LlamaForCausalLM", 3)
    assert (found.parameters, found.nbytes) == (count, 4 * count - 2 * 8)
    assert found.dtypes == {"float32": (len(tensors) - 1, count - 8), "bfloat16": (1, 8)}
    assert (found.vocabulary_rows, found.tied_head, found.adapters) == (16, False, ())
    assert found.not_finite == ()


def test_buffers_and_tied_heads_are_no_parameters(workshop: Any) -> None:
    tensors, buffer = workshop.tensors(), "model.layers.0.self_attn.rotary_emb.inv_freq"
    count = sum(tensor.numel() for tensor in tensors.values()) - tensors["lm_head.weight"].numel()
    spec = workshop.save("model", tensors | {buffer: torch.ones(4)}, tie_word_embeddings=True)
    found = inspect_model(spec)
    assert (found.parameters, found.tied_head) == (count, True)
    assert [tensor.name for tensor in found.tensors if tensor.buffer] == [buffer]


def test_a_head_that_is_not_saved_is_tied(workshop: Any) -> None:
    spec = workshop.save("model", workshop.tensors(tied=True), whole_config={"model_type": "llama"})
    found = inspect_model(spec)
    assert (found.tied_head, found.architecture) == (True, "llama")
    (Path(spec) / "config.json").unlink()
    assert inspect_model(spec).architecture is None
    bare = inspect_model(workshop.save("bare", {"x": torch.ones(2)}))
    assert (bare.vocabulary_rows, bare.tied_head, bare.layers) == (None, None, 0)


def test_json_holds_no_nan(workshop: Any) -> None:
    tensors = workshop.tensors() | {"odd": torch.tensor([NAN, INF])}
    plain = summary_json(inspect_model(workshop.save("model", tensors)))
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["not_finite"] == ["odd"]
    by_name = {tensor["name"]: tensor for tensor in plain["tensors"]}
    odd, down = by_name["odd"], by_name["model.layers.2.mlp.down_proj.weight"]
    assert (odd["mean"], odd["nan"], odd["inf"], odd["layer"]) == (None, 1, 1, "other")
    assert (down["layer"], down["kind"], down["shape"]) == ("2", "mlp.down", [8, 12])


def test_the_table_by_layer_fits_and_is_in_order(workshop: Any) -> None:
    tensors = {name: torch.full_like(tensor, 0.5) for name, tensor in workshop.tensors(layers=11).items()}
    text = shown(inspect_model(workshop.save("model", tensors)))
    rows = [line.split() for line in text.splitlines() if "–" in line]
    assert [row[0] for row in rows] == ["embedding", *map(str, range(11)), "norm", "head"]
    # nine tensors of 8·8·2 + 4·8·2 + 3·12·8 + 2·8 = 496 elements; the RMS of equal elements is the element
    assert rows[1] == ["0", "9", "496", "0.5", "0.5", "0.5", "–", "0.5", "0%", "0"]
    assert max(map(len, text.splitlines())) <= 80


def test_the_table_by_tensor_is_in_the_order_of_the_layers(workshop: Any) -> None:
    tensors = workshop.tensors(dtype=torch.bfloat16)
    summary = inspect_model(workshop.save("model", tensors))
    lines = shown(summary, width=110, by="tensor").splitlines()
    names = [line.split()[0] for line in lines if "weight " in line]
    assert sorted(names) == sorted(tensors)
    assert (names[0], names[-1]) == ("model.embed_tokens.weight", "lm_head.weight")
    assert "16×8" in next(line for line in lines if line.startswith("lm_head"))
    with raises_error("invalid_value", key="by"):
        render_summary(summary, by="kind")


@pytest.mark.parametrize("by", ["layer", "tensor"])
def test_what_is_not_finite_is_shown_by_name(workshop: Any, by: str) -> None:
    tensors = workshop.tensors()
    tensors["model.layers.1.mlp.up_proj.weight"][0, :2] = NAN
    tensors["lm_head.weight"][3, 3] = -INF
    text = shown(inspect_model(workshop.save("model", tensors)), width=100, by=by)
    assert "model.layers.1.mlp.up_proj.weight: 2 NaN, 0 infinite of 96" in text
    assert "lm_head.weight: 0 NaN, 1 infinite of 128" in text
