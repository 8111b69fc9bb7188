"""Adapters that are refused, by what is said of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from raises import raises_error
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
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa_niter_4"}, "was initialised with pissa_niter_4, which changed the"),
        ({"r": 3}, "'h.0.fc' has rank 3 in adapter_config.json and 2 in lora_A"),
        ({"lora_alpha": "much"}, "rank and alpha of 'h.0.fc' in adapter_config.json are not numbers"),
        ({"alpha_pattern": {"(": 1}}, "rank and alpha of 'h.0.fc' in adapter_config.json are not numbers"),
        ({"use_dora": True}, "use_dora is True, and there is no"),
    ],
)
def test_refused_configs(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    assert said in refusal(tmp_path, config, {})


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"fc.lora_A.weight": None}, "holds lora_B of 'h.0.fc' without lora_A and lora_B"),
        ({"fc.lora_A.weight": torch.ones(0)}, "lora_A [0] and lora_B [4, 2] of 'h.0.fc' are not"),
        ({"fc.lora_A.weight": torch.ones(2, 5)}, "[4, 5] as (outputs, inputs)"),
        ({"fc.lora_A.other.weight": torch.ones(2, 6)}, "holds two updates of 'h.0.fc'"),
        (
            {"fc.lora_B.bias": torch.ones(4)},
            "shifts [4] biases of 'h.0.fc'",
        ),
        ({"fc.lora_magnitude_vector": torch.ones(4)}, "use_dora is False, and"),
        (
            {"fc.base_layer.weight": torch.ones(5, 6)},
            "'h.0.fc.weight' with shape [5, 6], the base with [4, 6]",
        ),
        ({"fc.token_adapter": torch.ones(4)}, "holds 'h.0.fc.token_adapter', which is no LoRA"),
        (
            {"gate.lora_A.weight": torch.ones(2, 6), "gate.lora_B.weight": torch.ones(4, 2)},
            "adapts 'h.0.gate', of which the base has no weight",
        ),
        (
            {"conv.lora_A.weight": torch.ones(2, 2), "conv.lora_B.weight": torch.ones(2, 2)},
            "'h.0.conv.weight' [2, 2, 3]",
        ),
        ({"fc.lora_A.weight": None, "fc.lora_B.weight": None}, "holds no tensors"),
    ],
)
def test_refused_tensors(tmp_path: Path, tensors: dict[str, torch.Tensor | None], said: str) -> None:
    assert said in refusal(tmp_path, {}, tensors)


def test_a_magnitude_of_another_length(tmp_path: Path) -> None:
    said = refusal(tmp_path, {"use_dora": True}, {"fc.lora_magnitude_vector": torch.ones(6)})
    assert "lora_magnitude_vector of 'h.0.fc' is [6], and the layer has 4 outputs" in said


@pytest.mark.parametrize(
    ("names", "code"),
    [
        # Both towers end alike.
        (["text.h.0.fc.weight", "vision.h.0.fc.weight"], "ambiguous_tensor"),
        # No other name ends with fc.weight, but it is another layer's.
        (["h.5.fc.weight"], "missing_base_weight"),
    ],
)
def test_bases_in_which_a_name_is_not_found(tmp_path: Path, names: list[str], code: str) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    save_file({name: torch.zeros(4, 6) for name in names}, base / "model.safetensors")
    parts = {"h.0.fc.lora_A.weight": torch.ones(2, 6), "h.0.fc.lora_B.weight": torch.ones(4, 2)}
    save_file(parts, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    with raises_error(code):
        open_checkpoint(f"{base}+{adapter}")
