"""Hidden states that are kept in main memory give the same losses and weights, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raises import raises_error
from rlhf_algos import METHODS, SFTConfig, SFTTrainer, check_start, plan_machine
from rlhf_algos.parallel import activation_offloading
from rlhf_algos.parallel.activation_offloading import offloaded_states
from rlhf_algos.parallel.parallel import Parallel
from rlhf_data import TokenSequence, UserError
from rlhf_models.loading.tiny import tiny_model

ROWS = [TokenSequence([1 + i % 5, 2 + i % 7, i % 11, (3 * i) % 13, 4], 2) for i in range(8)]


def train(device: str) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of four steps with gradient checkpointing, and the weights after them."""
    losses: list[float] = []
    settings = {"learning_rate": 1e-2, "per_device_train_batch_size": 4, "max_steps": 4}
    config = SFTConfig.from_dict(settings | {"gradient_checkpointing": True})
    model: Any = tiny_model("llama", vocab_size=300, seed=0)
    model.to(device)
    trainer = SFTTrainer(model, config, ROWS, on_step=lambda _, metrics: losses.append(metrics["loss"]))
    trainer.train()
    return losses, [parameter.detach().cpu() for parameter in trainer.parameters]


ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU to offload from"),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_losses_and_weights_are_the_same(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    losses, weights = train(device)
    moved: list[torch.Size] = []

    class Recorded(activation_offloading._Moved):
        def __new__(cls, copy: torch.Tensor, *others: Any) -> Recorded:
            moved.append(copy.shape)
            return super().__new__(cls, copy, *others)

    monkeypatch.setattr(activation_offloading, "_Moved", Recorded)
    monkeypatch.setattr(Parallel, "offloading", lambda self: offloaded_states(self.device, least_bytes=0))
    offloaded, others = train(device)
    assert offloaded == losses
    assert all(torch.equal(one, other) for one, other in zip(others, weights, strict=True))
    layers = tiny_model("llama", vocab_size=300, seed=0).config.num_hidden_layers
    assert len(moved) >= 4 * layers  # of each step the input of every layer, and what the end needs
    assert not any(300 in shape for shape in moved)  # neither weights nor logits


def test_what_is_small_or_needs_no_gradient_stays() -> None:
    given: list[Any] = []
    hooks: Any = offloaded_states(torch.device("cpu"), least_bytes=1000)
    large = torch.ones(50, 10, requires_grad=True) * 2
    weight = torch.nn.Parameter(torch.ones(50, 10))
    for value in (large, large[:2], large.detach(), weight, weight.T):
        given.append(hooks.pack_hook(value))
    assert [isinstance(each, activation_offloading._Moved) for each in given] == [True] + 4 * [False]
    assert torch.equal(hooks.unpack_hook(given[0]), large)
    assert hooks.unpack_hook(given[1]) is given[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to offload from")
def test_it_is_refused_where_it_does_nothing() -> None:
    with pytest.raises(UserError, match="gradient_checkpointing"):
        METHODS["sft"].resolve({"activation_offloading": True})
    job = METHODS["sft"].resolve({"activation_offloading": True, "gradient_checkpointing": True})
    with raises_error("missing_gpu"):
        check_start(METHODS["sft"], job)
    check_start(METHODS["sft"], job, plan_machine(1, "H100"))
