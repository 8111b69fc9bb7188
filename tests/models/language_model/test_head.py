"""The language-model head, fused or not, whole or in chunks: the values and gradients of the formula."""

import math
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GraniteConfig

from proofs import by_default
from raises import raises_error
from rlhf_data import TokenSequence, pack
from rlhf_models import prepare_for_packing, tiny_model, token_logps
from rlhf_models.kernels.fused_head import FusedHead, HeadTargets
from rlhf_models.language_model import head as head_module
from rlhf_models.language_model.head import TokenLogps, logps_from_hidden, score_targets

VOCAB = 61
TREE = [TokenSequence([4, 5, 6, *rest], 3) for rest in ([7, 8, 2], [7, 9], [10, 11, 12, 2], [7, 8, 2])]


def scored_rows(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Hidden states, a head's weight, targets, and rows, of which some predict several targets."""
    torch.manual_seed(3)
    weight = torch.randn(VOCAB, 8, dtype=dtype, requires_grad=True)
    hidden = torch.randn(10, 8, dtype=dtype, requires_grad=True)
    rows = torch.cat([torch.arange(10), torch.randint(0, 10, (6,))])[torch.randperm(16)]
    targets = torch.randint(0, VOCAB, (16,))
    targets[rows == 3] = 7  # one row predicts the same token twice
    return weight, hidden, targets, rows


def fused(
    hidden: torch.Tensor, weight: torch.Tensor, targets: HeadTargets, scale: float = 1.0
) -> tuple[torch.Tensor, ...]:
    return FusedHead.apply(hidden, weight, targets, scale, True, True)


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-12))


def test_golden_values() -> None:
    # z = (ln 1, ln 2, ln 5) / 0.5 = (ln 1, ln 4, ln 25): p = (1, 4, 25) / 30.
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(5)]], dtype=torch.float64, requires_grad=True)
    hidden = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    targets = HeadTargets(torch.tensor([1, 2]), torch.tensor([0, 0]), 1, 1)
    logps, entropy, correct, mean = fused(hidden, weight, targets, scale=2.0)
    assert logps.tolist() == pytest.approx([math.log(4 / 30), math.log(25 / 30)])
    wanted = -sum(p * math.log(p) for p in (1 / 30, 4 / 30, 25 / 30))
    assert entropy.tolist() == pytest.approx([wanted, wanted])
    assert correct.tolist() == [False, True]
    assert mean.tolist() == pytest.approx([math.log(100) / 3] * 2)
    # d(logps[0])/dz = onehot(1) - p, times the scale, times h = 1.
    (grad,) = torch.autograd.grad(logps[0], weight)
    assert grad.flatten().tolist() == pytest.approx([-2 / 30, 2 - 8 / 30, -50 / 30])


@pytest.mark.parametrize("rows_per_chunk", by_default([1, 3, 100], 3))
@pytest.mark.parametrize("scale", by_default([1.0, 1.7], 1.7))
def test_gradients_are_those_of_finite_differences(rows_per_chunk: int, scale: float) -> None:
    weight, hidden, targets, rows = scored_rows()
    wanted = HeadTargets(targets, rows, len(hidden), rows_per_chunk)

    def scores(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return fused(hidden, weight, wanted, scale)[:2]

    assert torch.autograd.gradcheck(scores, (hidden, weight))


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("rows_per_chunk", [1, 3, 100])
def test_chunked_head_equals_the_whole(rows_per_chunk: int, fuse: bool) -> None:
    weight, hidden, targets, rows = scored_rows()
    if fuse:
        wanted = HeadTargets(targets, rows, len(hidden), rows_per_chunk)
        scored = TokenLogps(*fused(hidden, weight, wanted))
    else:
        scored = logps_from_hidden(
            lambda states: states @ weight.T,
            hidden,
            targets,
            rows=rows,
            rows_per_chunk=rows_per_chunk,
            with_entropy=True,
            with_stats=True,
        )
    logits = hidden[rows] @ weight.T
    distribution = torch.distributions.Categorical(logits=logits)
    assert scored.entropy is not None and scored.correct is not None and scored.mean_logits is not None
    torch.testing.assert_close(scored.logps, distribution.log_prob(targets))
    torch.testing.assert_close(scored.entropy, distribution.entropy())
    torch.testing.assert_close(scored.mean_logits, logits.mean(-1).detach())
    assert torch.equal(scored.correct, logits.argmax(-1) == targets)
    weights = torch.linspace(-1, 1, 16, dtype=torch.float64)
    got = torch.autograd.grad((scored.logps * weights + scored.entropy.square()).sum(), (weight, hidden))
    expected = torch.autograd.grad(
        (distribution.log_prob(targets) * weights + distribution.entropy().square()).sum(), (weight, hidden)
    )
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("rows_per_chunk", [3, 100])
def test_statistics_alone_carry_no_gradient(rows_per_chunk: int) -> None:
    weight, hidden, targets, rows = scored_rows()
    wanted = HeadTargets(targets, rows, len(hidden), rows_per_chunk)
    logps, entropy, correct, mean = FusedHead.apply(hidden, weight, wanted, 1.0, False, True)
    assert logps.requires_grad and not (entropy.requires_grad or correct.requires_grad or mean.requires_grad)
    others = logps_from_hidden(
        lambda states: states @ weight.T,
        hidden,
        targets,
        rows=rows,
        rows_per_chunk=rows_per_chunk,
        with_stats=True,
    )
    assert others.entropy is not None and others.mean_logits is not None
    assert others.logps.requires_grad and not (
        others.entropy.requires_grad or others.mean_logits.requires_grad
    )


def test_a_second_backward_pass_gives_the_same() -> None:
    weight, hidden, targets, rows = scored_rows()
    logps = fused(hidden, weight, HeadTargets(targets, rows, len(hidden), 100))[0].sum()
    first = torch.autograd.grad(logps, (weight, hidden), retain_graph=True)
    for a, b in zip(torch.autograd.grad(logps, (weight, hidden)), first, strict=True):
        assert torch.equal(a, b)


def test_a_frozen_head_gets_no_gradient() -> None:
    weight, hidden, targets, rows = scored_rows()
    for rows_per_chunk in (3, 100):
        wanted = HeadTargets(targets, rows, len(hidden), rows_per_chunk)
        logps = fused(hidden, weight.detach(), wanted)[0]
        (got,) = torch.autograd.grad(logps.sum(), (hidden,))
        (expected,) = torch.autograd.grad((hidden @ weight.T).log_softmax(-1)[rows, targets].sum(), (hidden,))
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("rows_per_chunk", [3, 100])
def test_half_precision_is_scored_in_fp32(rows_per_chunk: int) -> None:
    weight, hidden, targets, rows = (
        x.detach().bfloat16() if x.is_floating_point() else x for x in scored_rows()
    )
    hidden.requires_grad_()
    weight.requires_grad_()
    wanted = HeadTargets(targets, rows, len(hidden), rows_per_chunk)
    logps = fused(hidden, weight, wanted)[0]
    assert logps.dtype == torch.float32
    expected = (hidden @ weight.T).float().log_softmax(-1)[rows, targets]
    torch.testing.assert_close(logps, expected)
    got = torch.autograd.grad(logps.sum(), (weight, hidden))
    for a, b in zip(got, torch.autograd.grad(expected.sum(), (weight, hidden)), strict=True):
        assert a.dtype == torch.bfloat16 and relative_difference(a.float(), b.float()) < 0.02


def naive_logps(model: Any, temperature: float = 1.0) -> torch.Tensor:
    """Each sequence by itself through the model's own forward."""
    parts = []
    for sequence in TREE:
        ids = torch.tensor([list(sequence.input_ids)])
        logps = (model(input_ids=ids).logits[0].float() / temperature).log_softmax(-1)[:-1]
        parts.append(logps.gather(-1, ids[0, 1:, None])[sequence.score_from - 1 :, 0])
    return torch.cat(parts)


def gradients(model: Any, logps: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (logps * torch.linspace(-1, 1, len(logps))).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


HEADS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "scaled": {},
    "soft-capped": {},
    "frozen": {"tie_word_embeddings": False},
    "LoRA on the head": {"tie_word_embeddings": False},
    "hooked": {},
}


def make_model(kind: str) -> Any:
    if kind == "scaled":
        config = GraniteConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            initializer_range=0.3,
            logits_scaling=0.5,
            pad_token_id=0,
        )
        return AutoModelForCausalLM.from_config(config).eval()
    architecture = "gemma2" if kind == "soft-capped" else "llama"
    model: Any = tiny_model(architecture, vocab_size=VOCAB, initializer_range=0.3, **HEADS[kind])
    prepare_for_packing(model)
    if kind == "frozen":
        model.lm_head.weight.requires_grad_(False)
    if kind == "hooked":
        model.lm_head.register_forward_hook(lambda module, inputs, output: output)
    if kind == "LoRA on the head":
        settings = peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
        return peft.get_peft_model(model, settings).eval()
    return model


@pytest.mark.parametrize("chunk_logits", [1 << 20, 2 * VOCAB])
@pytest.mark.parametrize("kind", HEADS)
def test_every_head_scores_as_the_plain_model(
    kind: str, chunk_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_module, "CHUNK_BYTES", 4 * chunk_logits)
    model = make_model(kind)
    (batch,) = pack(TREE)
    expected = naive_logps(model, 0.7)
    wanted = gradients(model, expected)
    scored = token_logps(model, batch, temperature=0.7, with_stats=True)
    torch.testing.assert_close(scored.logps, expected, rtol=1e-5, atol=1e-5)
    got = gradients(model, scored.logps)
    assert got.keys() == wanted.keys()
    for name in wanted:
        assert relative_difference(got[name], wanted[name]) < 1e-5, name
    assert scored.mean_logits is not None
    first = model(input_ids=torch.tensor([[4, 5, 6]])).logits[0, -1].mean()
    torch.testing.assert_close(scored.mean_logits[0], first.detach())


@pytest.mark.parametrize("kind", HEADS)
def test_only_plain_heads_are_fused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(head_module, "logps_from_hidden", lambda *_, **__: calls.append(1))
    token_logps(make_model(kind), pack(TREE)[0])
    assert bool(calls) == (kind in ("soft-capped", "LoRA on the head", "hooked"))


@pytest.mark.parametrize("change", ["none", "sharded", "biased", "patched"])
def test_a_head_that_is_not_all_there_is_called_as_a_module(change: str) -> None:
    linear = nn.Linear(4, 6, bias=change == "biased")
    if change == "sharded":
        linear.weight = nn.Parameter(torch.zeros(12))
    if change == "patched":
        linear.forward = lambda input: input
    assert (head_module._is_matrix(linear) and head_module._is_bare(linear)) == (change == "none")


@pytest.mark.parametrize("kind", ["tied", "untied", "scaled", "soft-capped", "LoRA on the head"])
def test_a_partitioned_head_is_called_once_around_all_chunks(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call of the module, in the backward pass too, would gather its weight from all processes."""
    monkeypatch.setattr(head_module, "CHUNK_BYTES", 4 * 2 * VOCAB)
    model, (batch,) = make_model(kind), pack(TREE)
    head = head_module.causal_lm(model).get_output_embeddings()
    expected = naive_logps(model)
    wanted = gradients(model, expected)
    for parameter in head.parameters():
        parameter.ds_id = 0  # as DeepSpeed marks it
    if kind == "LoRA on the head":
        with raises_error("partitioned_head"):
            token_logps(model, batch)
        return
    calls = []
    head.register_forward_hook(lambda *_: calls.append(1))
    logps = token_logps(model, batch).logps
    torch.testing.assert_close(logps, expected, rtol=1e-5, atol=1e-5)
    got = gradients(model, logps)
    assert calls == [1]
    for name in wanted:
        assert relative_difference(got[name], wanted[name]) < 1e-5, name


def test_chunks_follow_the_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    # 2^27 bytes hold 220 rows of 152,064 logits in fp32 on a CPU, and GPUs hold a 64th of their memory:
    # 2^36 / 64 / (4 * 152,064) = 1765; a small one never less than a CPU.
    cuda = torch.device("cuda")
    assert head_module.chunk_rows(152_064, torch.device("cpu")) == 220
    for memory, rows in ((1 << 36, 1765), (1 << 32, 220)):
        properties = SimpleNamespace(total_memory=memory)
        monkeypatch.setattr("torch.cuda.get_device_properties", {cuda: properties}.__getitem__)
        assert head_module.chunk_rows(152_064, cuda) == rows
    assert head_module.chunk_rows(1 << 40, cuda) == 1
    assert head_module.chunk_rows(152_064, torch.device("cpu"), gpu_memory=1 << 36) == 1765


@pytest.mark.parametrize("chunk_logits", [1 << 20, 2 * VOCAB])
def test_under_autocast(chunk_logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "CHUNK_BYTES", 4 * chunk_logits)
    model = make_model("tied")
    (batch,) = pack(TREE)
    exact = token_logps(model, batch).logps
    wanted = gradients(model, exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logps = token_logps(model, batch).logps
    assert logps.dtype == torch.float32
    assert 0 < (logps - exact).abs().max() < 0.2
    got = gradients(model, logps)
    name = "model.embed_tokens.weight"
    assert got[name].dtype == torch.float32
    assert relative_difference(got[name], wanted[name]) < 0.1


def test_no_logits_of_the_whole_batch_exist() -> None:
    seen = []
    hidden, targets = torch.randn(10, 8, requires_grad=True), torch.zeros(10, dtype=torch.long)

    def head(states: torch.Tensor) -> torch.Tensor:
        seen.append(len(states))
        return states

    logps_from_hidden(head, hidden, targets, rows=torch.arange(10), rows_per_chunk=4).logps.sum().backward()
    assert sorted(seen) == [2, 2, 4, 4, 4, 4]  # forward and backward


def test_what_is_kept_for_the_backward_pass_is_bounded() -> None:
    weight, hidden, targets, rows = scored_rows()

    def kept(rows_per_chunk: int) -> int:
        sizes = []

        def pack_hook(tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
            fused(hidden, weight, HeadTargets(targets, rows, len(hidden), rows_per_chunk))
        return sum(sizes)

    inputs = hidden.numel() + weight.numel()
    assert kept(9) == inputs
    assert kept(10) == inputs + 10 * VOCAB


def test_the_head_sees_each_position_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def record(model: Any, hidden: torch.Tensor, targets: torch.Tensor, **options: Any) -> TokenLogps:
        seen.append(len(hidden))
        return score_targets(model, hidden, targets, **options)

    monkeypatch.setattr("rlhf_models.language_model.logps.score_targets", record)
    # Two answers [1] and [3] after one prompt: both are predicted from the prompt's last position.
    (batch,) = pack([TokenSequence([4, 5, 1], 2), TokenSequence([4, 5, 3], 2)])
    token_logps(make_model("tied"), batch)
    assert seen == [1]
