"""Linear layers through oneDNN give what torch's own give, wherever a model uses them."""

import copy
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from rlhf_data import TokenSequence, pack
from rlhf_models import build_tiny_llama, prepare_for_packing, tiny_model, token_logps
from rlhf_models.kernels import cpu_linear
from rlhf_models.kernels.cpu_linear import product, use_fast_linears

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN"
)


@pytest.fixture(autouse=True)
def onednn_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Takes every processor for one that oneDNN serves best, and records the shapes it computed."""
    calls: list[tuple[int, ...]] = []
    onednn = cpu_linear._onednn

    def record(*args: Any) -> torch.Tensor:
        calls.append(tuple(args[0].shape))
        return onednn(*args)

    monkeypatch.setattr(cpu_linear, "_mkl_is_slow", lambda: True)
    monkeypatch.setattr(cpu_linear, "_LEAST_PRODUCTS", 1)
    monkeypatch.setattr(cpu_linear, "_onednn", record)
    return calls


def gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    output = module(x)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), wanted)]


@pytest.mark.parametrize("kind", ["bias", "no bias", "frozen", "Conv1D"])
@pytest.mark.parametrize("shape", [(7,), (1, 7), (2, 3)])
def test_values_and_gradients(kind: str, shape: tuple[int, ...], onednn_calls: list[Any]) -> None:
    torch.manual_seed(0)
    layer = Conv1D(6, 5) if kind == "Conv1D" else nn.Linear(5, 6, bias=kind == "bias")
    if kind == "frozen":
        layer.requires_grad_(False)
    x = torch.randn(*shape, 5)
    expected = gradients(layer, x)
    use_fast_linears(layer)
    assert not onednn_calls
    for a, b in zip(gradients(layer, x), expected, strict=True):
        torch.testing.assert_close(a, b)
    assert len(onednn_calls) == (2 if kind == "frozen" else 3)


def test_product_of_views(onednn_calls: list[Any]) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(4, 9), torch.randn(9, 5)
    torch.testing.assert_close(product(a, b.T), a @ b)
    torch.testing.assert_close(product(a.T, torch.randn(3, 4).mul_(0).add_(1)), a.T @ torch.ones(4, 3))
    assert len(onednn_calls) == 2


@pytest.mark.parametrize("why", ["small", "float64", "autocast", "partitioned"])
def test_falls_back(why: str, monkeypatch: pytest.MonkeyPatch, onednn_calls: list[Any]) -> None:
    layer = nn.Linear(5, 6)
    use_fast_linears(layer)
    x = torch.randn(7, 5)
    if why == "small":
        monkeypatch.setattr(cpu_linear, "_LEAST_PRODUCTS", 7 * 5 * 6 + 1)
    if why == "float64":
        layer, x = layer.double(), x.double()
    if why == "partitioned":
        layer.weight.ds_id = 0  # pyright: ignore[reportAttributeAccessIssue]  (as DeepSpeed marks it)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=why == "autocast"):
        output = layer(x)
    assert output.dtype == (torch.bfloat16 if why == "autocast" else x.dtype)
    assert not onednn_calls


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_models_score_the_same(
    architecture: str, checkpointing: bool, onednn_calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (batch,) = pack([TokenSequence([4, 5, 6, *rest], 3) for rest in ([7, 8, 2], [7, 9], [10, 11, 12, 2])])
    logps, grads = [], []
    for least in (1 << 60, 1):
        monkeypatch.setattr(cpu_linear, "_LEAST_PRODUCTS", least)
        model = prepare_for_packing(tiny_model(architecture, initializer_range=0.2))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        logps.append(token_logps(model, batch).logps)
        logps[-1].sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
        assert bool(onednn_calls) == (least == 1)
    torch.testing.assert_close(logps[1], logps[0])
    torch.testing.assert_close(grads[1], grads[0])


def test_a_changed_model_is_used_as_before() -> None:
    model = tiny_model("llama")
    names = list(model.state_dict())
    prepare_for_packing(model)
    assert list(model.state_dict()) == names
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter("lm_head.weight").zero_()
    ids = torch.tensor([[4, 5, 6]])
    assert model(input_ids=ids).logits.abs().max() > 0 == other(input_ids=ids).logits.abs().max()
    adapted: Any = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    )
    with adapted.disable_adapter():
        plain = adapted(input_ids=ids).logits
    assert not torch.equal(adapted(input_ids=ids).logits, plain)
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    x = torch.randn(3, 32, requires_grad=True)
    torch.testing.assert_close(checkpoint(layer, x, use_reentrant=False), layer(x))


def test_processors_that_mkl_serves_well_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "_mkl_is_slow", lambda: False)
    model = prepare_for_packing(tiny_model("llama"))
    assert {type(m) for m in model.modules() if isinstance(m, nn.Linear)} == {nn.Linear}


def test_rows_beyond_the_batch_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = build_tiny_llama(64, hidden_size=32, num_layers=2)
    prompt = torch.randint(64, (120,)).tolist()
    texts = [prompt + torch.randint(64, (n,)).tolist() for n in (70, 31)]
    (batch,) = pack([TokenSequence(text, len(prompt)) for text in texts])

    def scored() -> list[Any]:
        model.zero_grad()
        logps = token_logps(model, batch).logps
        (logps * torch.linspace(-1, 1, len(logps))).sum().backward()
        return [logps.detach(), *(p.grad for p in model.parameters())]

    weight = next(model.parameters())
    monkeypatch.setattr(cpu_linear, "_LEAST_PRODUCTS", 150 * 32 * 32)
    assert cpu_linear.rounding(batch.num_tokens, weight) == -batch.num_tokens % 64 > 0
    assert cpu_linear.rounding(149, weight) == 0 == cpu_linear.rounding(221, weight.bfloat16())
    rounded = scored()
    monkeypatch.setattr(cpu_linear, "_ROUND", 1)
    for value, expected in zip(rounded, scored(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)
