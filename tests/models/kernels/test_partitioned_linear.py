"""Linear layers that keep no gathered weights give what torch's own give."""

import gc
import weakref

import pytest
import torch
from torch import nn

from rlhf_models import use_partitioned_linears
from rlhf_models.kernels.partitioned_linear import is_linear


def gradients(module: nn.Module, output: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), wanted)]


@pytest.mark.parametrize("kind", ["bias", "no bias", "frozen"])
@pytest.mark.parametrize("shape", [(7,), (2, 3)])
def test_values_and_gradients(kind: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 6, bias=kind == "bias").requires_grad_(kind != "frozen")
    x = torch.randn(*shape, 5, requires_grad=True)
    expected = gradients(layer, layer(x), x)
    use_partitioned_linears(layer)
    assert is_linear(layer)
    for one, other in zip(gradients(layer, layer(x), x), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("ours", [True, False])
def test_a_gathered_weight_goes_when_the_parameter_gets_another(ours: bool) -> None:
    layer, x = nn.Linear(5, 6), torch.randn(2, 3, 5, requires_grad=True)
    expected = gradients(layer, layer(x), x)
    if ours:
        use_partitioned_linears(layer)
    part = layer.weight.data.clone()
    storage = weakref.ref(layer.weight.untyped_storage())
    output = layer(x)
    layer.weight.data = torch.empty(0)  # as DeepSpeed does
    gc.collect()
    assert (storage() is None) == ours  # torch's own layer keeps it: then ours is not needed any more
    layer.weight.data = part
    for one, other in zip(gradients(layer, output, x), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_other_layers_stay() -> None:
    class Other(nn.Linear):
        pass

    other = Other(2, 2)
    use_partitioned_linears(other)
    assert type(other) is Other and not is_linear(other)
