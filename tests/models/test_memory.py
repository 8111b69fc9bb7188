"""What a pass keeps for its backward pass, against what autograd keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from rlhf_data import TokenSequence, pack
from rlhf_models import activation_bytes, prepare_for_packing, token_logps

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 50,
}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SHAPE, intermediate_size=256, num_key_value_heads=4),
        LlamaConfig(**SHAPE, intermediate_size=128, num_key_value_heads=1),
        Qwen3Config(**SHAPE, intermediate_size=192, num_key_value_heads=2, head_dim=16),
    ],
    ids=["llama", "few-heads", "qwen3"],
)
def test_activations_are_those_that_autograd_keeps(config: PreTrainedConfig) -> None:
    model = prepare_for_packing(AutoModelForCausalLM.from_config(config)).train()
    ids = torch.randint(3, 50, (4, 40), generator=torch.Generator().manual_seed(0)).tolist()
    (batch,) = pack([TokenSequence(row, 4) for row in ids])
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        token_logps(model, batch)
    assert sum(kept.values()) == pytest.approx(activation_bytes(config, batch.num_tokens, 4), rel=0.2)


def test_offloaded_inputs_of_layers_are_not_counted_but_for_two() -> None:
    shape: dict[str, Any] = SHAPE | {"num_hidden_layers": 6}
    config = LlamaConfig(**shape)
    kept, moved = (
        activation_bytes(config, 10, 2, checkpointing=True, offloading=offloading)
        for offloading in (False, True)
    )
    assert kept - moved == 4 * 10 * config.hidden_size * 2
