"""How the transformers engine uses the model and its memory: budgets, shared prompts, modes, autograd."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raises import raises_error
from rlhf_data import TokenSequence, pack
from rlhf_infer import GenerationEngine, SamplingParams, TransformersEngine
from rlhf_infer.kv.decode_attention import BLOCK, DecodeAttention
from rlhf_models import token_logps, train_byte_tokenizer
from rlhf_models.language_model.logps import stream_forward

EOS = SimpleNamespace(eos_token_id=2)


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 300, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Each forward pass that an engine makes: "prefill" or "decode", and its tokens."""
    made: list[tuple[str, int]] = []

    def recorded(model: Any, ids: Any, positions: Any, plan: Any) -> Any:
        made.append(("decode" if isinstance(plan, DecodeAttention) else "prefill", len(ids)))
        return stream_forward(model, ids, positions, plan)

    monkeypatch.setattr("rlhf_infer.engines.transformers_engine.stream_forward", recorded)
    return made


def test_each_prompt_is_prefilled_once_in_pieces_of_the_budget(
    passes: list[tuple[str, int]], lively_model: Any
) -> None:
    first, second, third = prompts_of(30, 8, 8)
    first[0], third[0] = 3, 4  # prompts are taken in the order of their tokens
    prompts = [first + second, third, first + third, first + second]  # 54 distinct tokens
    engine = TransformersEngine(lively_model(), EOS, max_prefill_tokens=46)
    engine.generate(prompts, 3, SamplingParams(1))
    # The two with a common start, 30 + 8 + 8, stay together, whichever of the two pieces they are.
    assert sorted(passes) == [("prefill", 8), ("prefill", 46)]
    passes.clear()
    engine.max_batch_tokens = 39  # rounds of one row of the two long prompts, which are still prefilled once
    engine.generate(prompts, 3, SamplingParams(1))
    assert sorted(passes) == [("prefill", 8), ("prefill", 38), ("prefill", 38)]


def test_the_budget_for_keys_and_values_holds_within_a_prompt_too(
    passes: list[tuple[str, int]], lively_model: Any
) -> None:
    prompts, params = prompts_of(10, 12), SamplingParams(10, seed=1)
    engine = TransformersEngine(lively_model(), EOS, max_batch_tokens=60)
    engine.eos_token_ids = [10**6]  # none ends
    engine.generate(prompts, 7, params)
    # 10 + 5·10 = 60, but 12 + 5·10 > 60: rounds of at most 5 and of at most 4 rows, as even as they can be.
    rows = [size for kind, size in passes if kind == "decode"]
    assert rows == [4] * 9 + [3] * 9 + [4] * 9 + [3] * 9
    passes.clear()
    engine.max_batch_tokens = 2 * (12 + 3 * 10)
    engine.generate(prompts, 3, params)
    assert [size for kind, size in passes if kind == "decode"] == [6] * 9


def test_finished_rows_leave_in_few_steps(passes: list[tuple[str, int]], lively_model: Any) -> None:
    engine = TransformersEngine(lively_model(), EOS)
    engine.eos_token_ids = list(range(2, 30))
    groups = engine.generate(prompts_of(5, 6, 7, 8), 8, SamplingParams(40, 1.5, 0))
    rows = [size for kind, size in passes if kind == "decode"]
    lengths = [len(rollout.completion_ids) for group in groups for rollout in group]
    for step, size in enumerate(rows, 1):
        unfinished = sum(length > step for length in lengths)
        # 3/4 of the rows, rounded down, is the next size; it comes as soon as that many are unfinished.
        assert unfinished <= size and int(0.75 * size) < unfinished
    assert set(rows) <= {32, 24, 18, 13, 9, 6, 4, 3, 2, 1} and len(set(rows)) > 5


def held_bytes(attention: DecodeAttention) -> int:
    """Bytes allocated for the keys and values of a cohort's rows."""
    own = [x for layer in attention._own.values() for x in layer]
    return sum(x.untyped_storage().nbytes() for x in own)


def test_memory_grows_with_the_tokens_and_shrinks_with_the_rows(
    monkeypatch: pytest.MonkeyPatch, lively_model: Any
) -> None:
    model = lively_model(max_position_embeddings=1024)
    config = model.config
    each = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4  # bytes of a token
    seen: list[tuple[int, int, int]] = []

    def recorded(model: Any, ids: Any, positions: Any, plan: Any) -> Any:
        hidden = stream_forward(model, ids, positions, plan)
        if isinstance(plan, DecodeAttention):
            seen.append((plan._step, len(ids), held_bytes(plan)))
        return hidden

    monkeypatch.setattr("rlhf_infer.engines.transformers_engine.stream_forward", recorded)
    engine = TransformersEngine(model, EOS)
    engine.eos_token_ids = [2, 3]
    prompts, params = prompts_of(5, 6), SamplingParams(300, 1.5, 0)
    groups = engine.generate(prompts, 8, params)
    assert max(len(rollout.completion_ids) for group in groups for rollout in group) > 2 * BLOCK
    assert len({rows for _, rows, _ in seen}) > 3
    for step, rows, held in seen:
        # Blocks of 128 tokens for the rows that are left, not 300 for all 16.
        assert held == each * rows * min(300, (step // BLOCK + 1) * BLOCK)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_what_grows_and_shrinks_is_what_plain_generation_reads(name: str, lively_model: Any) -> None:
    model = lively_model(name, max_position_embeddings=1024)
    [prompt] = prompts_of(7)
    engine = TransformersEngine(model, EOS)
    engine.eos_token_ids = [10**6]
    [[rollout]] = engine.generate([prompt], 1, SamplingParams(BLOCK + 40, temperature=0))
    ids = torch.tensor([[*prompt, *rollout.completion_ids]])
    with torch.no_grad():
        logps = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    assert rollout.logps == pytest.approx(logps.amax(-1).tolist(), abs=1e-3)


def test_a_completion_that_does_not_fit_the_budget_is_refused(lively_model: Any) -> None:
    engine = TransformersEngine(lively_model(max_position_embeddings=512), EOS, max_batch_tokens=50)
    [prompt] = prompts_of(10)
    assert len(engine.generate([prompt], 3, SamplingParams(40))[0]) == 3
    with raises_error("max_batch_tokens_too_small"):
        engine.generate([prompt], 1, SamplingParams(41))


def test_keys_and_values_are_kept_in_the_dtype_of_autocast(
    monkeypatch: pytest.MonkeyPatch, lively_model: Any
) -> None:
    plans: list[DecodeAttention] = []

    class Recording(DecodeAttention):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            plans.append(self)

    monkeypatch.setattr("rlhf_infer.engines.transformers_engine.DecodeAttention", Recording)
    model, prompts = lively_model(), prompts_of(9, 5)
    params = SamplingParams(8, temperature=0)
    plain = TransformersEngine(model, EOS).generate(prompts, 1, params)
    with torch.autocast("cpu", torch.bfloat16):
        groups = TransformersEngine(model, EOS).generate(prompts, 1, params)
    for plan, dtype in zip(plans, (torch.float32, torch.bfloat16), strict=True):
        kept = [*plan._cache.layers.values(), *plan._own.values()]
        assert len(kept) > 2 and {x.dtype for pair in kept for x in pair} == {dtype}
    # As near to a plain forward pass under autocast as bfloat16 is; fp32 is further away.
    assert groups != plain
    for prompt, (rollout,) in zip(prompts, groups, strict=True):
        ids = torch.tensor([[*prompt, *rollout.completion_ids]])
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        logps = logits.log_softmax(-1).gather(-1, torch.tensor(rollout.completion_ids)[:, None])[:, 0]
        assert rollout.logps == pytest.approx(logps.tolist(), abs=0.05)


def test_dropout_is_off_and_every_part_gets_its_mode_back(lively_model: Any) -> None:
    model = lively_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    prompts, params = prompts_of(5, 9), SamplingParams(6, seed=2)
    expected = TransformersEngine(model, EOS).generate(prompts, 3, params)
    model.train()
    model.transformer.h[0].eval()  # a frozen part
    modes = [module.training for module in model.modules()]
    assert TransformersEngine(model, EOS).generate(prompts, 3, params) == expected
    assert [module.training for module in model.modules()] == modes and len(set(modes)) == 2

    def fail(completion: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        TransformersEngine(model, EOS).generate(prompts, 1, SamplingParams(6, logits_processors=(fail,)))
    assert [module.training for module in model.modules()] == modes


def test_training_goes_on_after_generation(lively_model: Any) -> None:
    # Dynamic rotary embeddings keep frequencies from the last forward pass in the model.
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = lively_model(rope_parameters=rope, max_position_embeddings=16).train()
    prompt = prompts_of(5)[0]
    ((rollout,),) = TransformersEngine(model, EOS).generate([prompt], 1, SamplingParams(6))
    assert not any(x.is_inference() for x in [*model.parameters(), *model.buffers()])
    (batch,) = pack([TokenSequence([*prompt, *rollout.completion_ids], len(prompt))])
    token_logps(model, batch).logps.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_it_is_an_engine_that_shares_its_model(lively_model: Any) -> None:
    model = lively_model()
    engine: GenerationEngine = TransformersEngine(model, EOS)
    prompts, params = prompts_of(5, 9), SamplingParams(6)
    before = engine.generate(prompts, 2, params)
    with torch.no_grad():
        model.model.norm.weight.mul_(-1.0)
    engine.update_weights(model)
    after = engine.generate(prompts, 2, params)
    assert before != after == TransformersEngine(model, EOS).generate(prompts, 2, params)
    with pytest.raises(ValueError, match="the model that it was made with"):
        engine.update_weights(lively_model())
    engine.close()


def test_logits_processors_see_each_unfinished_rows_own_completion(lively_model: Any) -> None:
    seen: list[list[int]] = []

    def alternate(completion: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Only tokens of the other parity than the last; end tokens only after five."""
        seen.append(completion)
        if len(completion) == 5:
            return logits.index_fill(0, torch.arange(100), -torch.inf)
        allowed = torch.arange(logits.shape[0]) % 2 != (completion or [1])[-1] % 2
        return logits.masked_fill(~allowed, -torch.inf)

    engine = TransformersEngine(lively_model(), EOS)
    engine.eos_token_ids = list(range(2, 40))
    params = SamplingParams(9, 1.5, 0, logits_processors=(alternate,), min_new_tokens=2)
    groups = engine.generate(prompts_of(5, 9), 6, params)
    completions = [rollout.completion_ids for group in groups for rollout in group]
    for ids in completions:
        assert all(a % 2 != b % 2 for a, b in itertools.pairwise(ids[:5])) and len(ids) > 2
        assert len(ids) < 6 or ids[5] >= 100
    # Once for every token, with the tokens before it.
    expected = [ids[:n] for ids in completions for n in range(len(ids))]
    assert sorted(seen) == sorted(expected) and len({len(ids) for ids in completions}) > 2


def test_stop_texts_end_completions_and_stay_in_them(lively_model: Any) -> None:
    tokenizer: Any = train_byte_tokenizer(["ab"], 259)
    letters = {i: tokenizer.decode([i]) for i in range(3, 259)}

    def a_or_b(completion: list[int], logits: torch.Tensor) -> torch.Tensor:
        allowed = torch.tensor([letters.get(i) in ("a", "b") for i in range(len(logits))])
        return torch.where(allowed, 0.1 * logits, -torch.inf)

    def texts(least: int) -> list[str]:
        params = SamplingParams(
            12, seed=1, stop=("aa", "bab"), min_new_tokens=least, logits_processors=(a_or_b,)
        )
        (group,) = TransformersEngine(lively_model(), tokenizer).generate(prompts_of(5), 40, params)
        for rollout in group:
            assert len(rollout.logps) == len(rollout.completion_ids)
            text = tokenizer.decode(rollout.completion_ids)
            assert (rollout.finish_reason == "stop") == (text.endswith(("aa", "bab")))
        return [tokenizer.decode(rollout.completion_ids) for rollout in group]

    for text in texts(0):
        assert "aa" not in text[:-1] and "bab" not in text[:-1]
    later = texts(7)
    # Only what ends behind the first seven tokens counts, as in vLLM; each token is a letter here.
    assert min(map(len, later)) == 8 and any("aa" in text[:5] for text in later)
    for text in later:
        assert not any(text[:n].endswith(("aa", "bab")) for n in range(8, len(text)))
