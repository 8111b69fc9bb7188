"""Models whose rotary frequencies depend on the longest text of a batch say so when it matters."""

import logging
from typing import Any

import pytest

from raises import raises_error
from rlhf_algos import longest_sequence
from rlhf_data import TokenSequence, pack
from rlhf_models import (
    check_prompt_fits,
    context_length,
    generation_length,
    tiny_model,
    token_logps,
)
from rlhf_models.attention import rotary

HALF = 4  # of the dimensions of a head
ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    "longrope": {
        "max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "factor": 4.0,
            "short_factor": [1.0] * HALF,
            "long_factor": [2.0] * HALF,
            "original_max_position_embeddings": 16,
        },
    },
    "default": {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "default"}},
}


@pytest.mark.parametrize("name", ROPES)
def test_texts_beyond_the_length_are_warned_of_where_others_share_the_batch(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    fields = ROPES[name]
    fields["rope_parameters"].setdefault("rope_theta", 10000.0)
    model = tiny_model("llama", **fields)
    short, long = TokenSequence(range(3, 15), 1), TokenSequence(range(20, 40), 1)
    rotary._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "rlhf_models"):
        for rows in ([short, short], [long]):
            token_logps(model, pack(rows)[0])
        assert not caplog.records
        for _ in range(2):
            token_logps(model, pack([short, long])[0])
    assert len(caplog.records) == (name != "default")
    assert not caplog.records or "16 tokens" in caplog.records[0].getMessage()


@pytest.mark.parametrize(("name", "context", "generated"), [("longrope", 64, 16), ("default", 64, 64)])
def test_generation_ends_where_frequencies_change(name: str, context: int, generated: int) -> None:
    fields = ROPES[name]
    fields["rope_parameters"].setdefault("rope_theta", 10000.0)
    config = tiny_model("llama", **fields).config
    assert (context_length(config), generation_length(config)) == (context, generated)
    assert longest_sequence(config, 40) == 40
    assert longest_sequence(config, 40, generates=True) == min(40, generated)
    check_prompt_fits(config, generated, "it")
    with raises_error("context_too_short", limit=generated):
        check_prompt_fits(config, generated + 1, "it")
