"""The transformers engine: greedy = `model.generate`, log-probs = `token_logps`, samples reproduce."""

from typing import Any

import pytest
import torch
from transformers import Gemma2Config, GPT2Config, LlamaConfig, MistralConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from rlhf_data import TokenSequence, UserError, pack
from rlhf_infer import SamplingParams, TransformersEngine
from rlhf_models.logps import token_logps

SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "gpt2": lambda: GPT2Config(
        vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    "llama": lambda: LlamaConfig(**SHAPE),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=5),
    "gemma2": lambda: Gemma2Config(**SHAPE, head_dim=8, sliding_window=5, attn_logit_softcapping=5.0),
}


class Tokenizer:
    eos_token_id = 2


def make_model(name: str, implementation: str = "sdpa"):
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config._attn_implementation = implementation
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5.0)
    model.generation_config.pad_token_id = 0
    return model


def ragged_prompts() -> list[list[int]]:
    torch.manual_seed(1)
    prompts = [torch.randint(3, 40, (n,)).tolist() for n in (1, 9, 4, 17, 9)]
    return [*prompts, [*prompts[1][:5], 7, 8], prompts[3]]


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_equals_generate_token_for_token(name: str) -> None:
    prompts = ragged_prompts()
    engine = TransformersEngine(make_model(name), Tokenizer())
    ours = engine.generate(prompts, 1, SamplingParams(12, temperature=0))
    eager = make_model(name, "eager")
    stopped = 0
    for prompt, (rollout,) in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            expected = eager.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
            )
        assert rollout.completion_ids == expected[0, len(prompt) :].tolist()
        stopped += rollout.finish_reason == "stop"
    assert len({tuple(r.completion_ids) for (r,) in ours}) > 2


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampling_logps_equal_token_logps(name: str, temperature: float) -> None:
    model = make_model(name)
    rollouts = TransformersEngine(model, Tokenizer()).generate(
        ragged_prompts(), 5, SamplingParams(10, temperature, 3)
    )
    for group in rollouts:
        for rollout in group:
            ids = [*rollout.prompt_ids, *rollout.completion_ids]
            (batch,) = pack([TokenSequence(ids, len(rollout.prompt_ids))])
            with torch.no_grad():
                expected = token_logps(model, batch, temperature=temperature).logps
            assert torch.allclose(torch.tensor(rollout.logps), expected, atol=1e-4, rtol=0)
    reasons = [r.finish_reason for group in rollouts for r in group]
    assert {"stop", "length"} == set(reasons)
    for group in rollouts:
        for rollout in group:
            assert (rollout.completion_ids[-1] == 2) == (rollout.finish_reason == "stop")
            assert 2 not in rollout.completion_ids[:-1]


def test_a_sample_depends_on_seed_prompt_and_index_only() -> None:
    engine = TransformersEngine(make_model("llama"), Tokenizer())
    prompts, params = ragged_prompts(), SamplingParams(8, 1.0, 11)
    together = engine.generate(prompts, 4, params)
    alone = engine.generate([prompts[2]], 6, params)
    small = TransformersEngine(make_model("llama"), Tokenizer(), max_batch_tokens=60).generate(
        prompts, 4, params
    )
    ids = [[r.completion_ids for r in group] for group in together]
    assert [r.completion_ids for r in alone[0][:4]] == ids[2]
    assert [[r.completion_ids for r in group] for group in small] == ids
    other = engine.generate(prompts, 4, SamplingParams(8, 1.0, 12))
    assert [[r.completion_ids for r in group] for group in other] != ids


def test_samples_follow_the_distribution() -> None:
    # Frequencies of the first token against the model's probabilities: chi-square-like bound.
    model = make_model("llama")
    n = 4000
    (group,) = TransformersEngine(model, Tokenizer()).generate([[5, 6, 7]], n, SamplingParams(1, 1.3, 5))
    counts = torch.bincount(torch.tensor([r.completion_ids[0] for r in group]), minlength=40) / n
    with torch.no_grad():
        wanted = (model(torch.tensor([[5, 6, 7]])).logits[0, -1] / 1.3).softmax(-1)
    # The standard error of each frequency is at most 0.5 / sqrt(n) = 0.008; five of them.
    assert (counts - wanted).abs().max() < 0.04
    assert wanted.max() < 0.9


def test_too_long_prompts_and_empty_prompts_are_refused() -> None:
    engine = TransformersEngine(make_model("llama"), Tokenizer())
    with pytest.raises(UserError, match="context of 64"):
        engine.generate([[3] * 60], 1, SamplingParams(8))
    with pytest.raises(UserError, match="no tokens"):
        engine.generate([[]], 1, SamplingParams(8))
