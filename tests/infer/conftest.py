"""What several tests of generation share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def lively_model() -> Callable[..., Any]:
    """Builds a tiny model whose logits are far from even; takes the arguments of `tiny_model`."""
    import torch

    from rlhf_models import tiny_model

    def build(name: str = "llama", **fields: Any) -> Any:
        model = tiny_model(name, **fields)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4.0)
        return model

    return build
