"""The transformers engine: greedy = `model.generate`, log-probs = `token_logps`, samples reproduce."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from lively import lively
from proofs import by_default
from raises import raises_error
from rlhf_data import TokenSequence, pack
from rlhf_infer import Rollout, SamplingParams, TransformersEngine
from rlhf_models import tiny_model, token_logps, train_byte_tokenizer
from rlhf_models.loading.tiny import TINY_ARCHITECTURES

EOS = SimpleNamespace(eos_token_id=2)

VOCAB_SIZE = 300


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_byte_tokenizer(["the stop of it all, and then the end."] * 3, VOCAB_SIZE)


def make_model(name: str, implementation: str | None = None, ends: int = 1, **fields: Any) -> Any:
    """A model whose tokens 2 to 1 + `ends` end a completion, with logits far from even."""
    model = tiny_model(name, vocab_size=VOCAB_SIZE, **fields)
    if implementation:
        model.set_attn_implementation(implementation)
    lively(model)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = list(range(2, 2 + ends))
    return model


def ragged_prompts(count: int = 7) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 9, 4, 17, 9, *torch.randint(1, 20, (count,), generator=generator).tolist()]
    prompts = [torch.randint(60, 250, (n,), generator=generator).tolist() for n in lengths[: count - 2]]
    return [*prompts, [*prompts[1][:5], 70, 80], prompts[3]]


def generated(name: str, prompts: list[list[int]], n: int, params: SamplingParams, **options: Any) -> Any:
    model = make_model(name, ends=options.pop("ends", 1))
    return TransformersEngine(model, options.pop("tokenizer", EOS), **options).generate(prompts, n, params)


def ids_of(groups: list[list[Rollout]]) -> list[list[list[int]]]:
    return [[rollout.completion_ids for rollout in group] for group in groups]


@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
def test_greedy_equals_generate_on_a_ragged_batch(name: str) -> None:
    prompts, width = ragged_prompts(15), 19
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    ends = 40  # so that completions end at different lengths
    expected = make_model(name, "eager", ends).generate(
        ids, attention_mask=mask, max_new_tokens=16, do_sample=False
    )
    ours = generated(name, prompts, 1, SamplingParams(16, temperature=0), ends=ends)
    for row, (rollout,) in zip(expected[:, width:].tolist(), ours, strict=True):
        length = len(rollout.completion_ids)
        assert rollout.completion_ids == row[:length] and not any(row[length:])
    assert len({len(rollout.completion_ids) for (rollout,) in ours}) > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY_ARCHITECTURES)
@pytest.mark.parametrize("feature", ["repetition_penalty", "min_new_tokens", "stop"])
def test_greedy_with_more_settings_equals_generate(name: str, feature: str, tokenizer: Any) -> None:
    prompts, ends = [[*prompt, 1] for prompt in ragged_prompts()[:5]], 1 if feature == "stop" else 60
    plain = generated(name, prompts, 1, SamplingParams(16, 0), ends=ends)
    settings: Any = {"repetition_penalty": 1.5, "min_new_tokens": 7, "stop": stop_texts(tokenizer, plain)}
    params = SamplingParams(16, 0, **{feature: settings[feature]})
    ours = generated(name, prompts, 1, params, ends=ends, tokenizer=tokenizer)
    theirs = {"stop_strings": list(params.stop), "tokenizer": tokenizer} if params.stop else {}
    eager = make_model(name, "eager", ends)
    for prompt, (rollout,) in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        expected = eager.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=16,
            do_sample=False,
            repetition_penalty=params.repetition_penalty,
            min_new_tokens=params.min_new_tokens,
            **theirs,
        )[0, len(prompt) :].tolist()
        assert rollout.completion_ids == expected
        ended = expected[-1] < 2 + ends or any(text in tokenizer.decode(expected) for text in params.stop)
        assert rollout.finish_reason == ("stop" if ended else "length")
    assert ids_of(ours) != ids_of(plain)


def stop_texts(tokenizer: Any, groups: list[list[Rollout]]) -> tuple[str, ...]:
    """Texts that greedy completions hold, from within a token into the one after it."""
    pairs = [r.completion_ids[at : at + 2] for (r,) in groups for at in range(3, 12)]
    texts = [tokenizer.decode(pair)[-2:] for pair in pairs]
    return tuple(text for text in texts if len(text) == 2 and "\ufffd" not in text)[:3]


def assert_logps_are_the_trainers(model: Any, groups: list[list[Rollout]], temperature: float) -> None:
    rollouts = [rollout for group in groups for rollout in group]
    sequences = [TokenSequence([*r.prompt_ids, *r.completion_ids], len(r.prompt_ids)) for r in rollouts]
    (batch,) = pack(sequences)
    with torch.no_grad():
        scored = token_logps(model, batch, temperature=temperature).logps
    for q, index in enumerate(batch.sequence_ids.tolist()):
        ours = torch.tensor(rollouts[index].logps)
        torch.testing.assert_close(ours, scored[batch.score_sequence == q], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", by_default(TINY_ARCHITECTURES, "llama", "gpt2", "gemma2"))
@pytest.mark.parametrize("temperature", by_default([1.0, 0.6], 0.6))
def test_sampling_logps_equal_token_logps(name: str, temperature: float) -> None:
    model = make_model(name, ends=20)
    rollouts = TransformersEngine(model, EOS).generate(
        ragged_prompts(), 5, SamplingParams(20, temperature, 3)
    )
    assert_logps_are_the_trainers(model, rollouts, temperature)
    assert {r.finish_reason for group in rollouts for r in group} == {"stop", "length"}
    for rollout in (r for group in rollouts for r in group):
        ended = [2 <= token < 22 for token in rollout.completion_ids]
        assert ended[-1] == (rollout.finish_reason == "stop") and not any(ended[:-1])
        assert rollout.finish_reason == "stop" or len(rollout.completion_ids) == 20


def test_logps_are_the_whole_distributions_whatever_was_cut_off() -> None:
    model = make_model("llama")
    params = SamplingParams(
        10, 0.9, 3, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.2, min_new_tokens=2
    )
    rollouts = TransformersEngine(model, EOS).generate(ragged_prompts(), 4, params)
    assert_logps_are_the_trainers(model, rollouts, 0.9)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_adapters_are_sampled_from_when_active(name: str) -> None:
    base = make_model(name)
    targets = ["c_attn"] if name == "gpt2" else ["q_proj", "v_proj", "up_proj"]
    model: Any = get_peft_model(
        base, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", fan_in_fan_out=name == "gpt2")
    )
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    engine, params = TransformersEngine(model, EOS), SamplingParams(8, 0.8, 1)
    adapted = engine.generate(ragged_prompts(), 3, params)
    assert_logps_are_the_trainers(model, adapted, 0.8)
    with model.disable_adapter():
        plain = engine.generate(ragged_prompts(), 3, params)
    assert ids_of(plain) == ids_of(generated(name, ragged_prompts(), 3, params)) != ids_of(adapted)


@pytest.mark.parametrize("name", ["llama", pytest.param("mistral", marks=pytest.mark.slow)])
def test_a_sample_depends_on_seed_prompt_and_index_only(name: str) -> None:
    # Rows finish at all times, prompts run out of rows, and parts are cut between and within prompts.
    prompts, params = ragged_prompts(21), SamplingParams(14, 1.3, 11)
    together = generated(name, prompts, 4, params, ends=20)
    cuts: list[dict[str, Any]] = [
        {"max_batch_tokens": 200},
        {"max_batch_tokens": 40},  # two or three samples of one prompt at a time
        {"max_batch_tokens": 35, "max_prefill_tokens": 1},
        {"max_prefill_tokens": 25},
    ]
    others = [generated(name, prompts, 4, params, ends=20, **cut) for cut in cuts]
    others.append([generated(name, [prompt], 6, params, ends=20)[0][:4] for prompt in prompts[:8]])
    for other in others:
        assert ids_of(other) == ids_of(together[: len(other)])
        for one, two in zip(together, other, strict=False):
            for a, b in zip(one, two, strict=True):
                assert torch.allclose(torch.tensor(a.logps), torch.tensor(b.logps), atol=1e-5, rtol=0)
                assert a.finish_reason == b.finish_reason
    seed = SamplingParams(14, 1.3, 12)
    assert ids_of(generated(name, prompts, 4, seed, ends=20)) != ids_of(together)
    assert len({tuple(r.completion_ids) for group in together for r in group}) > 60


def test_samples_follow_the_distribution() -> None:
    # Frequencies of the first token against the model's probabilities: chi-square-like bound.
    model, n = make_model("llama"), 4000
    (group,) = TransformersEngine(model, EOS).generate([[5, 6, 7]], n, SamplingParams(1, 1.3, 5))
    counts = torch.bincount(torch.tensor([r.completion_ids[0] for r in group]), minlength=VOCAB_SIZE) / n
    with torch.no_grad():
        wanted = (model(torch.tensor([[5, 6, 7]])).logits[0, -1] / 1.3).softmax(-1)
    # The standard error of each frequency is at most 0.5 / sqrt(n) = 0.008; five of them.
    assert (counts - wanted).abs().max() < 0.04
    assert wanted.max() < 0.9


def test_unusable_prompts_and_counts_are_refused() -> None:
    engine = TransformersEngine(make_model("llama"), EOS)
    with raises_error("context_too_short"):
        engine.generate([[3] * 122], 1, SamplingParams(8))
    with raises_error("empty_prompt"):
        engine.generate([[]], 1, SamplingParams(8))
    with pytest.raises(ValueError, match="n must be at least 1"):
        engine.generate([[3]], 0, SamplingParams(8))
    assert engine.generate([], 2, SamplingParams(8)) == []


def test_longrope_ends_where_its_frequencies_change(tokenizer: Any) -> None:
    """Beyond, a text's keys would be rotated by two sets of frequencies, and those of other texts with it."""
    rope = {"rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    half = make_model("llama").config.head_dim // 2
    rope |= {"short_factor": [1.0] * half, "long_factor": [4.0] * half}
    model = make_model("llama", max_position_embeddings=128, rope_parameters=rope)
    engine = TransformersEngine(model, tokenizer)
    params = SamplingParams(20, temperature=0, ignore_eos=True)
    alone = engine.generate([[5, 6, 7]], 1, params)[0][0]
    together = engine.generate([[5, 6, 7], list(range(5, 17))], 1, params)[0][0]
    assert alone.completion_ids == together.completion_ids
    assert alone.logps == pytest.approx(together.logps, abs=1e-5)
    with raises_error("context_too_short"):
        engine.generate([[5, 6, 7], list(range(5, 18))], 1, params)
