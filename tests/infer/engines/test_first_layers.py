"""A model's first layers as a draft model that shares its weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from letters import LetterTokenizer
from proofs import by_default
from raises import raises_error
from rlhf_infer import (
    DraftModel,
    Rollout,
    SamplingParams,
    SpeculativeDecoder,
    TransformersEngine,
    first_layers,
)
from rlhf_models.loading.tiny import TINY_ARCHITECTURES

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 20], [30, 31]]


def same(found: list[list[Rollout]], expected: list[list[Rollout]]) -> bool:
    pairs = zip([r for group in found for r in group], [r for group in expected for r in group], strict=True)
    return all(
        a.completion_ids == b.completion_ids and a.logps == pytest.approx(b.logps, abs=1e-5) for a, b in pairs
    )


@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_they_are_a_model_of_that_many_layers(architecture: str, lively_model: Any) -> None:
    """Equal to a model that is built with one layer and loads the weights that it has a place for."""
    model = lively_model(architecture)
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.layer_types = 1, (getattr(config, "layer_types", None) or [])[:1] or None
    alone = type(model)(config)
    alone.load_state_dict(model.state_dict(), strict=False)
    part, params = first_layers(model, 1), SamplingParams(12, seed=2)
    found = TransformersEngine(part.eval(), LetterTokenizer()).generate(PROMPTS, 2, params)
    assert same(found, TransformersEngine(alone.eval(), LetterTokenizer()).generate(PROMPTS, 2, params))
    assert model.config.get_text_config().num_hidden_layers == 2
    mine = {each.data_ptr() for each in part.parameters()}
    assert mine < {each.data_ptr() for each in model.parameters()}, "no weight is copied"


@pytest.mark.parametrize("architecture", by_default(TINY_ARCHITECTURES, "llama", "gpt2"))
def test_their_drafts_change_no_token(architecture: str, lively_model: Any) -> None:
    model, tokenizer = lively_model(architecture), LetterTokenizer()
    drafter = DraftModel(first_layers(model, 1), tokenizer, guesses=3)
    drafter.measured = False  # guesses in every pass, whether they pay or not
    found = SpeculativeDecoder(model, tokenizer, drafter).generate(PROMPTS, 1, SamplingParams(12, seed=2))
    params = SamplingParams(12, seed=2, coupled=True)
    assert same(found, TransformersEngine(model, tokenizer).generate(PROMPTS, 1, params))


@pytest.mark.parametrize("count", [0, 2])
def test_all_layers_or_none_are_refused(count: int, lively_model: Any) -> None:
    with raises_error("invalid_value", key="draft_layers"):
        first_layers(lively_model(), count)
