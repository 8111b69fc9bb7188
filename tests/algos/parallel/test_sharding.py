"""Which modules are gathered together."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from rlhf_algos.parallel.sharding import units


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_output_layer_are_units_unless_they_share_weights(tied: bool) -> None:
    """Tied, they belong to the module around them; the decoder inside knows of no output layer."""
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    lm = AutoModelForCausalLM.from_config(LlamaConfig(**shape, vocab_size=20, tie_word_embeddings=tied))
    holder = nn.Module()
    holder.lm = lm
    found = units(holder)
    assert set(lm.model.layers) <= set(found)
    assert (lm.model.embed_tokens in found, lm.lm_head in found) == ((not tied), (not tied))
