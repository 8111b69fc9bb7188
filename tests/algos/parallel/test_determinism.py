"""Two runs of a GPU are the same to the bit where this is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf_algos import SFTConfig, SFTTrainer
from rlhf_data import TokenSequence
from rlhf_models import tiny_model

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def as_before() -> Any:
    """Leaves the process's mode as it was."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_two_runs_are_the_same(device: str) -> None:
    """Of rows that share prefixes, whose gradients are sums over what comes after them."""
    stem = [1 + i % 11 for i in range(60)]
    rows = [
        tuple(TokenSequence([*stem[: 20 + i], 13, j * 3 % 17, 5, j], 2) for j in range(9)) for i in range(8)
    ]

    def run() -> list[float]:
        model: Any = tiny_model("llama", vocab_size=32, seed=0)
        model.to(device)
        settings = {"learning_rate": 1e-2, "max_steps": 6, "per_device_train_batch_size": 4}
        config = SFTConfig.from_dict(settings | {"full_determinism": True})
        norms: list[float] = []
        SFTTrainer(model, config, rows, on_step=lambda _, found: norms.append(found["grad_norm"])).train()
        return norms

    assert run() == run()
    assert torch.are_deterministic_algorithms_enabled() == torch.cuda.is_available()
