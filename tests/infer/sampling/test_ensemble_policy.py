"""Ensembles of policies: votes, and averaged logits against plain padded transformers."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lively import lively
from raises import raises_error
from rlhf_infer import EnsemblePolicy, Rollout, SamplingParams, TransformersEngine
from rlhf_models import tiny_model

EOS = SimpleNamespace(eos_token_id=2)

VOCAB_SIZE = 300
PROMPTS = [[60, 61, 62], [70], [60, 61, 80, 81, 82, 83, 84], [60, 61, 62]]


def make_model(seed: int = 0, name: str = "llama", **fields: Any) -> Any:
    """A model whose tokens 2 to 31 end a completion, with logits far from even."""
    model = lively(tiny_model(name, vocab_size=VOCAB_SIZE, seed=seed, **fields))
    model.generation_config.eos_token_id = list(range(2, 32))
    return model


def padded_logits(model: Any, sequences: list[list[int]]) -> torch.Tensor:
    """Next-token logits (B, V) of left-padded sequences, through the plain model."""
    width = max(map(len, sequences))
    ids = torch.tensor([[0] * (width - len(s)) + s for s in sequences])
    mask = torch.tensor([[0] * (width - len(s)) + [1] * len(s) for s in sequences])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1].float()


def greedy_reference(
    models: list[Any], weights: list[float], length: int
) -> list[tuple[list[int], list[float]]]:
    """Greedy completions of averaged logits and their log-probs."""
    sequences = [list(prompt) for prompt in PROMPTS]
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in PROMPTS]
    for _ in range(length):
        logits = sum(w * padded_logits(model, sequences) for model, w in zip(models, weights, strict=True))
        assert isinstance(logits, torch.Tensor)
        logps, tokens = logits.log_softmax(-1).max(-1)
        for i, (token, logp) in enumerate(zip(tokens.tolist(), logps.tolist(), strict=True)):
            sequences[i].append(token)
            if not found[i][0] or found[i][0][-1] not in range(2, 32):
                found[i][0].append(token)
                found[i][1].append(logp)
    return found


def all_of(groups: list[list[Rollout]]) -> list[tuple[list[int], list[float], str]]:
    return [(r.completion_ids, r.logps, r.finish_reason) for group in groups for r in group]


def test_averaging_a_model_with_itself_is_the_model_to_the_bit() -> None:
    model, params = make_model(), SamplingParams(12, temperature=0.8, seed=5)
    alone = TransformersEngine(model, EOS).generate(PROMPTS, 3, params)
    for weights in (None, [0.2, 0.7, 0.4]):
        members = [model] * (2 if weights is None else 3)
        ours = EnsemblePolicy(members, EOS, weights=weights).generate(PROMPTS, 3, params)
        assert all_of(ours) == all_of(alone)
    assert len({len(ids) for ids, _, _ in all_of(alone)}) > 2


@pytest.mark.parametrize("weights", [None, [1.0, 3.0]])
def test_greedy_equals_a_plain_padded_loop(weights: list[float] | None) -> None:
    # Models of different widths and depths, so that their states and layers are not alike.
    def models() -> list[Any]:
        return [make_model(0), make_model(1, hidden_size=64, num_hidden_layers=3)]

    shares = [0.5, 0.5] if weights is None else [0.25, 0.75]
    expected = greedy_reference(models(), shares, 10)
    ours = EnsemblePolicy(models(), EOS, weights=weights).generate(
        PROMPTS, 1, SamplingParams(10, temperature=0)
    )
    for (ids, logps), (rollout,) in zip(expected, ours, strict=True):
        assert rollout.completion_ids == ids
        assert rollout.logps == pytest.approx(logps, abs=1e-4)
    for model in models():
        alone = TransformersEngine(model, EOS).generate(PROMPTS, 1, SamplingParams(10, temperature=0))
        assert all_of(alone) != all_of(ours)


def test_samples_come_in_rounds_and_in_parts() -> None:
    members, params = [make_model(0), make_model(1)], SamplingParams(8, seed=2)
    policy = EnsemblePolicy(members, EOS)
    whole = policy.generate(PROMPTS, 6, params)
    first, second = policy.generate(PROMPTS, 2, params), policy.generate(PROMPTS, 4, params, first=2)
    joined = [a + b for a, b in zip(first, second, strict=True)]
    small = EnsemblePolicy(members, EOS, max_batch_tokens=24).generate(PROMPTS, 6, params)
    for other in (joined, small):
        assert [ids for ids, _, _ in all_of(other)] == [ids for ids, _, _ in all_of(whole)]
    assert whole[0] == whole[3]


def test_a_vote_takes_the_answer_with_most_weight(byte_tokenizer: Any) -> None:
    members = [make_model(seed) for seed in range(3)]
    params = SamplingParams(1, temperature=0.5, seed=1)
    drawn = [TransformersEngine(model, byte_tokenizer).generate(PROMPTS, 16, params) for model in members]
    decided = 0

    def vowels(text: str) -> str:
        return str(sum(letter in "aeiou" for letter in text))

    def answer(rollout: Rollout) -> str:
        return vowels(byte_tokenizer.decode(rollout.completion_ids, skip_special_tokens=True))

    for weights in ([1.0, 1.0, 1.0], [1.0, 1.0, 5.0]):
        policy = EnsemblePolicy(members, byte_tokenizer, how="vote", weights=weights, extract=vowels)
        groups = policy.generate(PROMPTS, 16, params)
        for prompt, group in enumerate(groups):
            for i, winner in enumerate(group):
                voters = [members_drawn[prompt][i] for members_drawn in drawn]
                votes = Counter[str]()
                for voter, weight in zip(voters, weights, strict=True):
                    votes[answer(voter)] += weight  # pyright: ignore[reportArgumentType]
                assert votes[answer(winner)] == max(votes.values())
                assert winner == next(v for v in voters if answer(v) == answer(winner))
                decided += winner != voters[0]
    assert decided > 0


def test_texts_without_an_answer_have_no_vote(byte_tokenizer: Any) -> None:
    engines = [TransformersEngine(make_model(seed), byte_tokenizer) for seed in range(2)]
    params = SamplingParams(3, seed=3)
    first, second = (engine.generate(PROMPTS, 8, params) for engine in engines)

    def text(rollout: Rollout) -> str:
        return byte_tokenizer.decode(rollout.completion_ids, skip_special_tokens=True)

    at = next(i for i in range(8) if text(first[0][i]) != text(second[0][i]))
    silent = text(first[0][at])
    policy = EnsemblePolicy(
        engines, byte_tokenizer, how="vote", extract=lambda text: None if text == silent else text
    )
    assert policy.generate(PROMPTS, 8, params)[0][at] == second[0][at]
    nobody = EnsemblePolicy(engines, byte_tokenizer, how="vote", extract=lambda text: None)
    assert nobody.generate(PROMPTS, 8, params) == first
    nobody.close()


def test_refusals() -> None:
    model = make_model()
    cases: list[tuple[list[Any], dict[str, Any], str, str | None]] = [
        ([], {}, "invalid_value", "members"),
        ([model], {"how": "mean"}, "invalid_value", "how"),
        ([model, model], {"weights": [1.0]}, "invalid_value", "weights"),
        ([model, model], {"weights": [1.0, 0.0]}, "invalid_value", "weights"),
        ([model], {"extract": str}, "invalid_value", "extract"),
        ([TransformersEngine(model, EOS)], {}, "not_a_model", None),
        (
            [TransformersEngine(model, EOS)],
            {"how": "vote", "max_batch_tokens": 9},
            "unused_option",
            None,
        ),
        ([model, tiny_model("llama", vocab_size=310)], {}, "different_vocabularies", None),
        ([model, tiny_model("llama", vocab_size=300)], {}, "different_end_tokens", None),
        ([model, tiny_model("llama", vocab_size=300)], {"how": "vote"}, "different_end_tokens", None),
    ]
    for members, settings, code, key in cases:
        with raises_error(code, key=key):
            EnsemblePolicy(members, EOS, **settings)
    with raises_error("cannot_sync_weights"):
        EnsemblePolicy([model], EOS).update_weights(model)


def test_the_shortest_context_is_the_ensemble_s() -> None:
    short, long = make_model(0, max_position_embeddings=16), make_model(1, max_position_embeddings=64)
    for members in ([short, long], [long, short]):
        with raises_error("context_too_short"):
            EnsemblePolicy(members, EOS).generate(PROMPTS, 1, SamplingParams(12))
