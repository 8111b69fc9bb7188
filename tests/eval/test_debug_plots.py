"""Gradient and activation figures: what goes into which cell, and that odd runs are drawn."""

import pytest

from files import png_size
from proofs import by_default
from rlhf_eval import activation_figure, gradient_flow_figure
from rlhf_eval.debug_plots import _cells, _layer_norms, _spread

FULL = {
    "model.embed_tokens.weight": 4.0,
    "model.layers.0.self_attn.q_proj.weight": 3.0,
    "model.layers.0.self_attn.q_proj.bias": 4.0,
    "model.layers.1.self_attn.q_proj.weight": 0.0,
    "model.layers.10.self_attn.q_proj.weight": 1.0,
    "model.layers.2.self_attn.q_proj.weight": None,
    "model.norm.weight": 2.0,
    "lm_head.weight": 0.5,
}
LORA = {
    f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{side}.default.weight": 0.1
    for layer in (0, 1)
    for side in "AB"
}


def test_parameters_are_placed_by_kind_and_layer():
    cells, kinds, layers = _cells(FULL)
    assert kinds == ["embed_tokens", "self_attn.q_proj", "self_attn.q_proj.bias", "norm", "lm_head"]
    assert layers == ["in", "0", "1", "2", "10", "out"]
    assert cells["self_attn.q_proj", "0"] == 3.0 and cells["lm_head", "out"] == 0.5
    assert cells["self_attn.q_proj", "2"] is None


def test_adapters_and_gpt2_are_placed_too():
    cells, kinds, layers = _cells(LORA)
    assert kinds == ["self_attn.q_proj.lora_A", "self_attn.q_proj.lora_B"] and layers == ["0", "1"]
    names = ["transformer.wte.weight", "transformer.h.0.attn.c_attn.weight", "transformer.ln_f.bias"]
    cells, kinds, layers = _cells(dict.fromkeys(names, 1.0))
    assert list(cells) == [("wte", "in"), ("attn.c_attn", "0"), ("bias", "out")]


def test_a_layer_s_norm_is_that_of_its_parameters_together():
    # sqrt(3^2 + 4^2) = 5; sqrt(2^2 + 0.5^2) = 2.0616; one gradient that is no number makes the layer's none
    norms = _layer_norms(FULL)
    assert norms == {"in": 4, "0": 5, "1": 0, "2": None, "10": 1, "out": pytest.approx(2.0615528)}


def test_long_runs_are_thinned_with_the_last_step_kept():
    assert _spread(3) == [0, 1, 2]
    thinned = _spread(1000)
    assert len(thinned) == len(set(thinned)) == 60 and thinned[0] == 0 and thinned[-1] == 999


@pytest.mark.parametrize(
    "norms", by_default([FULL, LORA, {"weight": 0.0}, {"weight": None}], LORA, {"weight": None})
)
def test_gradient_figures_of_odd_models(tmp_path, norms):
    gradient_flow_figure([{"step": step, "norms": norms} for step in (5, 10)], tmp_path / "flow.png")
    width, height = png_size(tmp_path / "flow.png")
    assert width > height > 500


def test_nothing_recorded_is_refused(tmp_path):
    for rows in ([], [{"step": 1, "norms": {}}]):
        with pytest.raises(ValueError, match="no gradient norms"):
            gradient_flow_figure(rows, tmp_path / "flow.png")
    for rows in ([], [{"step": 1, "edges": [1, 2], "layers": []}]):
        with pytest.raises(ValueError, match="no activations"):
            activation_figure(rows, tmp_path / "activations.png")


@pytest.mark.parametrize(
    "counts", by_default([[0, 3, 5, 0], [0, 0, 0, 0], [9, 0, 0, 0]], [0, 3, 5, 0], [0, 0, 0, 0])
)
@pytest.mark.parametrize("steps", by_default([(1,), (1, 2, 3)], (1, 2, 3)))
def test_activation_figures_of_odd_layers(tmp_path, counts, steps):
    layer = {"counts": counts, "mean": 0.0, "std": 0.5 * sum(counts), "absmax": 1.0, "nonfinite": 2}
    rows = [{"step": step, "edges": [0.1, 1, 10, 100, 1000], "layers": [layer] * 3} for step in steps]
    activation_figure(rows, tmp_path / "activations.png")
    width, height = png_size(tmp_path / "activations.png")
    assert width > height > 400
