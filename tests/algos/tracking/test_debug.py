"""Debug switches record what is there and leave training as it was."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from torch import nn

from rlhf_algos.tracking.debug import (
    ActivationHistograms,
    GradientFlow,
    Sampler,
    decoder_layers,
    nonfinite_message,
    prompt_text,
)
from rlhf_data import RunFolder, TokenSequence, pack
from rlhf_models import token_logps


def _backward(model, ids=(5, 6, 7, 8)):
    (batch,) = pack([TokenSequence(list(ids), 1)])
    (-token_logps(model, batch).logps.sum()).backward()


def test_gradient_flow_records_every_parameter_s_norm_on_its_turn(tmp_path, tiny_llama):
    run = RunFolder(tmp_path)
    flow = GradientFlow(tiny_llama, run, every=2)
    for step in (1, 2, 3, 4):
        _backward(tiny_llama)
        flow.record(step, scale=8.0)
    rows = run.read_lines("gradient_flow.jsonl")
    assert [row["step"] for row in rows] == [2, 4]
    gradients = {name: p.grad for name, p in tiny_llama.named_parameters() if p.grad is not None}
    norms = rows[-1]["norms"]
    assert norms.keys() == gradients.keys() and len(norms) > 10
    name = "model.layers.1.mlp.up_proj.weight"
    assert norms[name] == pytest.approx(gradients[name].square().sum().sqrt().item() / 8)
    assert not (tmp_path / "gradient_flow.png").exists()
    flow.draw()
    assert (tmp_path / "gradient_flow.png").stat().st_size > 5000


def test_a_gradient_that_is_no_number_is_recorded_as_null(tmp_path):
    model = nn.Linear(2, 1)
    model(torch.tensor([[math.inf, 1.0]])).sum().backward()
    run = RunFolder(tmp_path)
    GradientFlow(model, run, every=1).record(1)
    assert run.read_lines("gradient_flow.jsonl") == [{"step": 1, "norms": {"weight": None, "bias": 1.0}}]


def test_nothing_recorded_draws_nothing(tmp_path, tiny_llama):
    for run in (None, RunFolder(tmp_path)):
        flow = GradientFlow(tiny_llama, run, every=1)
        flow.record(1)  # no gradients yet
        activations = ActivationHistograms(tiny_llama, run, every=2)
        activations.before_step(1)
        activations.after_step(1)
        flow.draw()
        activations.draw()
    assert list(tmp_path.iterdir()) == []


class _Layers(nn.Module):
    """Layers that add a constant, the second in a tuple, as some decoders give it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity(), nn.Identity()])

    def forward(self, hidden):
        return self.layers[1](self.layers[0](hidden))


def test_activations_are_counted_over_all_passes_of_a_step(tmp_path):
    run, model = RunFolder(tmp_path), _Layers()
    histograms = ActivationHistograms(model, run, every=3)
    histograms.before_step(3)
    for value in (0.02, -0.02, 300.0):
        model(torch.full((2, 5), value))
    model(torch.tensor([0.0, math.nan, math.inf]))
    histograms.after_step(3)
    model(torch.ones(7))  # not a recorded step: no hook is left
    assert not any(layer._forward_hooks for layer in model.layers)
    (row,) = run.read_lines("activations.jsonl")
    counts = {}
    for count, low, high in zip(row["layers"][1]["counts"], row["edges"][:-1], row["edges"][1:], strict=True):
        counts |= {(low, high): count} if count else {}
    assert [(low <= 0.02 <= high, low <= 300 <= high, count) for (low, high), count in counts.items()] == [
        (False, False, 1),  # the zero, in the first bin
        (True, False, 20),
        (False, True, 10),
    ]
    layer = row["layers"][1]
    # 31 finite values: mean 3000 / 31; E[x^2] = (10 * 300^2 + 20 * 0.02^2) / 31
    assert layer["mean"] == pytest.approx(3000 / 31)
    assert layer["std"] == pytest.approx(math.sqrt((900_000 + 0.008) / 31 - (3000 / 31) ** 2))
    assert layer["absmax"] == 300 and layer["nonfinite"] == 2
    histograms.draw()
    assert (tmp_path / "activations.png").stat().st_size > 5000


def test_activations_of_a_decoder_leave_its_gradients_alone(tmp_path, tiny_llama):
    _backward(tiny_llama)
    expected = [p.grad.clone() for p in tiny_llama.parameters() if p.grad is not None]
    tiny_llama.zero_grad()
    run = RunFolder(tmp_path)
    histograms = ActivationHistograms(tiny_llama, run, every=1)
    histograms.before_step(1)
    _backward(tiny_llama)
    histograms.after_step(1)
    found = [p.grad for p in tiny_llama.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    (row,) = run.read_lines("activations.jsonl")
    assert [sum(layer["counts"]) for layer in row["layers"]] == [4 * 32, 4 * 32]


def test_decoder_layers_are_the_longest_list_of_like_modules():
    model = nn.Module()
    model.heads = nn.ModuleList([nn.Linear(1, 1)] * 3)
    model.mixed = nn.ModuleList([nn.Linear(1, 1), nn.Identity(), nn.ReLU(), nn.Tanh(), nn.GELU()])
    model.layers = nn.ModuleList([nn.Identity() for _ in range(4)])
    assert decoder_layers(model) == list(model.layers)
    with pytest.raises(ValueError, match="no list of like layers"):
        decoder_layers(nn.Linear(1, 1))


def test_samples_are_greedy_and_change_nothing(tmp_path, tiny_llama, byte_tokenizer):
    prompts = [
        byte_tokenizer(text)["input_ids"] for text in ("where is mary ?", "ball moved", "where is mary ?")
    ]
    run = RunFolder(tmp_path)
    sampler = Sampler(tiny_llama, byte_tokenizer, prompts, run, every=5, max_new_tokens=6)
    tiny_llama.train()
    tiny_llama.model.norm.eval()
    state = torch.get_rng_state()
    for step in range(1, 11):
        sampler.after_step(step)
    assert torch.equal(state, torch.get_rng_state())
    assert tiny_llama.training and tiny_llama.model.layers[0].training and not tiny_llama.model.norm.training
    rows = run.read_lines("samples.jsonl")
    assert [(row["step"], row["prompt"]) for row in rows] == [
        (step, text) for step in (5, 10) for text in ("where is mary ?", "ball moved")
    ]
    assert rows[:2] == [row | {"step": 5} for row in rows[2:]]
    ids = torch.tensor([prompts[0]])
    for _ in range(6):
        ids = torch.cat([ids, tiny_llama.eval()(ids).logits[:, -1:].argmax(-1)], dim=1)
    continued = byte_tokenizer.decode(ids[0, len(prompts[0]) :], skip_special_tokens=True)
    assert rows[0]["completion"] == continued and rows[0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([1, 10, 11], "ab"),
        ([1, 2, 10, 2, 11], "</s>a</s>b"),  # other special tokens are the chat template's
        ([1, 10, 1, 11], "<s>a<s>b"),  # and so is a start token that opens every turn
        ([10, 1], "a<s>"),
        ([1], ""),
        ([], ""),
    ],
)
def test_prompts_are_shown_without_their_start_token(ids, text):
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(WordLevel({"<s>": 1, "</s>": 2, "a": 10, "b": 11}))
    backend.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    assert prompt_text(tokenizer, tuple(ids)) == text
    tokenizer.bos_token = None
    assert prompt_text(tokenizer, [10, 11]) == "ab"


def test_sample_prompts_are_distinct_and_fit(tmp_path, tiny_llama, byte_tokenizer):
    sequences = [TokenSequence([1, 2, 3, 4], 2), TokenSequence([1, 2, 9], 2), TokenSequence([5, 6], 0)]
    sequences += [TokenSequence([7, 8], 1), TokenSequence([9, 9], 2)]
    assert Sampler.prompts_of(sequences, 3) == [(1, 2), (5,), (7,)]
    conversation = TokenSequence([1, 2, 3, 4, 5], 0, [False, False, True, True, False])
    assert Sampler.prompts_of([conversation]) == [(1, 2)]
    limit = tiny_llama.config.max_position_embeddings
    prompts = [[5] * (limit - 8), [5] * (limit - 7), []]
    sampler = Sampler(tiny_llama, byte_tokenizer, prompts, RunFolder(tmp_path), every=1, max_new_tokens=8)
    assert [len(prompt) for prompt in sampler.prompts] == [limit - 8]


def test_the_sentence_for_a_loss_that_is_no_number():
    said = nonfinite_message(
        {"loss": math.nan, "grad_norm": math.inf},
        step=12,
        rows=[3, 17, 20],
        checkpoint=Path("run/checkpoint-10"),
        learning_rate=1e-5,
    )
    assert said == (
        "step 12 gave loss nan, gradient norm inf at learning rate 1e-05 on the 3 training examples 3, 17, "
        "20 (counted from 0); look at them or lower learning_rate; the last good checkpoint is "
        "run/checkpoint-10"
    )
    short = nonfinite_message({"loss": 1.0}, step=1, rows=range(30), checkpoint=None, learning_rate=1.0)
    assert "on the 30 training examples 0, 1, " in short and "19, ... (counted" in short
    assert short.endswith("there is no checkpoint yet") and "gradient" not in short
