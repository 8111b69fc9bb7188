"""Adapters that are refused, by what is said of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlhf_merge.errors import MergeError
from rlhf_merge.files.checkpoint import open_checkpoint


def refusal(tmp_path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> str:
    """What is said of an adapter of a 4 x 6 `fc` that is changed in its config or its tensors."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    matrix = torch.zeros(4, 6)
    weights = {
        "h.0.fc.weight": matrix,
        "h.1.fc.weight": matrix.clone(),
        "h.0.conv.weight": torch.zeros(2, 2, 3),
    }
    save_file(weights, base / "model.safetensors")
    held = {"fc.lora_A.weight": torch.ones(2, 6), "fc.lora_B.weight": torch.ones(4, 2), **tensors}
    save_file(
        {f"base_model.model.h.0.{key}": value for key, value in held.items() if value is not None},
        adapter / "adapter_model.safetensors",
    )
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, **config}))
    with pytest.raises(MergeError) as caught:
        open_checkpoint(f"{base}+{adapter}")
    message = str(caught.value)
    assert message.startswith(str(adapter))
    return message


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "is an adapter of type IA3, of which only LORA is read"),
        ({"peft_type": None}, "is an adapter of type None"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens of adapter_config.json is set"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters of adapter_config.json is set"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices of adapter_config.json is set"),
        ({"init_lora_weights": "pissa_niter_4"}, "was initialised with pissa_niter_4, which changed the"),
        ({"r": 3}, "gives 'h.0.fc' rank 3, and its lora_A has 2"),
        ({"lora_alpha": "much"}, "rank and alpha of 'h.0.fc' in adapter_config.json are not numbers"),
        ({"alpha_pattern": {"(": 1}}, "rank and alpha of 'h.0.fc' in adapter_config.json are not numbers"),
        ({"use_dora": True}, "use_dora of adapter_config.json is True, and there is no"),
    ],
)
def test_refused_configs(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    assert said in refusal(tmp_path, config, {})


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"fc.lora_A.weight": None}, "holds lora_B of 'h.0.fc' without lora_A and lora_B"),
        ({"fc.lora_A.weight": torch.ones(0)}, "lora_A [0] and lora_B [4, 2] of 'h.0.fc' are not"),
        ({"fc.lora_A.weight": torch.ones(2, 5)}, "has shape [4, 5] as (outputs, inputs), and the base's "),
        ({"fc.lora_A.other.weight": torch.ones(2, 6)}, "holds two updates of 'h.0.fc'"),
        (
            {"fc.lora_B.bias": torch.ones(4)},
            "shifts the bias of 'h.0.fc' by [4] values, and the base has none",
        ),
        ({"fc.lora_magnitude_vector": torch.ones(4)}, "use_dora of adapter_config.json is False, and"),
        (
            {"fc.base_layer.weight": torch.ones(5, 6)},
            "'h.0.fc.weight' with shape [5, 6], and the base with [4, 6]",
        ),
        ({"fc.token_adapter": torch.ones(4)}, "holds 'h.0.fc.token_adapter', which is no part of a LoRA"),
        (
            {"gate.lora_A.weight": torch.ones(2, 6), "gate.lora_B.weight": torch.ones(4, 2)},
            "adapts 'h.0.gate', of which the base holds no weight",
        ),
        (
            {"conv.lora_A.weight": torch.ones(2, 2), "conv.lora_B.weight": torch.ones(2, 2)},
            "and the base's 'h.0.conv.weight' has [2, 2, 3]",
        ),
        ({"fc.lora_A.weight": None, "fc.lora_B.weight": None}, "holds no tensors"),
    ],
)
def test_refused_tensors(tmp_path: Path, tensors: dict[str, torch.Tensor | None], said: str) -> None:
    assert said in refusal(tmp_path, {}, tensors)


def test_a_magnitude_of_another_length(tmp_path: Path) -> None:
    said = refusal(tmp_path, {"use_dora": True}, {"fc.lora_magnitude_vector": torch.ones(6)})
    assert "lora_magnitude_vector of 'h.0.fc' has shape [6], and the layer has 4 outputs" in said


@pytest.mark.parametrize(
    ("names", "said"),
    [
        # Both towers end alike.
        (["text.h.0.fc.weight", "vision.h.0.fc.weight"], "may be any of the base's text.h.0.fc.weight,"),
        # No other name ends with fc.weight, but it is another layer's.
        (["h.5.fc.weight"], "adapts 'h.0.fc', of which the base holds no weight"),
    ],
)
def test_bases_in_which_a_name_is_not_found(tmp_path: Path, names: list[str], said: str) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    save_file({name: torch.zeros(4, 6) for name in names}, base / "model.safetensors")
    parts = {"h.0.fc.lora_A.weight": torch.ones(2, 6), "h.0.fc.lora_B.weight": torch.ones(4, 2)}
    save_file(parts, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    with pytest.raises(MergeError, match=said):
        open_checkpoint(f"{base}+{adapter}")
