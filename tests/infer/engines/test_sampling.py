"""Sampling: transformers' distribution in transformers' order, random numbers by hand, and refusals."""

import hashlib
from itertools import product
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from raises import raises_error
from rlhf_infer import SamplingParams
from rlhf_infer.engines.sampler import Sampler, invert, truncated, uniforms

EOS = [2, 5]
CPU = torch.device("cpu")


def random_logits(rows: int, vocab_size: int, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def warpers(params: SamplingParams) -> Any:
    steps: list[Any] = []
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    return LogitsProcessorList(steps)


def draw(params: SamplingParams, logits: torch.Tensor, prompts: list[tuple[int, ...]], step: int = 0) -> Any:
    """What a sampler draws of given logits (P·n, V); every row's completion is [7, 8, 9][:step]."""
    n = len(logits) // len(prompts)
    sampler = Sampler(params, EOS, prompts, range(n), vocab_size=logits.shape[1], device=CPU)
    drawn = sampler.draw(lambda states: states, logits, step, lambda row: [7, 8, 9][:step])
    return drawn.tokens, drawn.logps


@pytest.mark.parametrize(
    "scale", [0.3, 3.0]
)  # nearly even: top-p must sort beyond its first guess; and steep
def test_truncation_equals_transformers_warpers(scale: float) -> None:
    logits = random_logits(6, 700, scale)
    logits[0, 3:9] = logits[0].max()  # ties at the top
    for top_k, top_p, min_p in product([0, 1, 5, 300, 900], [0.05, 0.5, 0.95, 1.0], [0.0, 0.1, 1.0]):
        params = SamplingParams(4, top_k=top_k, top_p=top_p, min_p=min_p)
        ids: Any = None
        expected = warpers(params)(ids, logits.clone())
        ours = truncated(logits, params)
        tied = top_p < 1  # of equally likely tokens it is open which the nucleus takes
        assert torch.equal((ours > -torch.inf)[tied:], (expected > -torch.inf)[tied:]), params
        assert torch.equal((ours > -torch.inf).sum(1), (expected > -torch.inf).sum(1)), params
        torch.testing.assert_close(ours[tied:].softmax(-1), expected[tied:].softmax(-1))
        assert ((ours > -torch.inf).sum(1) >= 1).all()


def test_the_whole_order_equals_transformers() -> None:
    def favour(completion: list[int], row: torch.Tensor) -> torch.Tensor:
        assert completion == [7, 8, 9]
        row[11] += 4.0
        return row

    params = SamplingParams(
        8,
        1.7,
        3,
        top_p=0.9,
        top_k=20,
        min_p=0.02,
        repetition_penalty=1.4,
        min_new_tokens=4,
        logits_processors=(favour,),
    )
    prompt, n = (4, 11, 12, 11), 500
    logits = random_logits(1, 40).expand(n, -1)
    seen: Any = torch.tensor([[*prompt, 7, 8, 9]])
    first: Any = logits[:1].clone()
    changed: Any = RepetitionPenaltyLogitsProcessor(1.4)(seen, first)
    changed = MinNewTokensLengthLogitsProcessor(4, 4, EOS)(seen, changed)
    changed = favour([7, 8, 9], changed[0])[None]
    changed = warpers(params)(seen, TemperatureLogitsWarper(1.7)(seen, changed))
    sampler = Sampler(params, EOS, [prompt], range(n), vocab_size=40, device=CPU)
    for step, token in enumerate((7, 8, 9)):  # the sampler sees what it drew itself
        forced = torch.full((n, 40), -100.0).index_fill(1, torch.tensor(token), 100.0)
        tokens = sampler.draw(lambda x: x, forced, step, lambda row: None).tokens
        assert (tokens == token).all()
    drawn = sampler.draw(lambda states: states, logits, 3, lambda row: [7, 8, 9])
    tokens, logps = drawn.tokens, drawn.logps
    expected = invert(changed.expand(n, -1).log_softmax(-1), uniforms([prompt], range(n), params)[:, 3])
    assert torch.equal(tokens, expected)
    assert len(set(tokens.tolist())) > 3 and not set(tokens.tolist()) & set(EOS)
    # The log-probs are the model's own at the temperature, untouched by all of that.
    torch.testing.assert_close(logps, (logits / 1.7).log_softmax(-1).gather(1, tokens[:, None])[:, 0])


def test_greedy_obeys_penalty_and_least_length_only() -> None:
    logits = torch.tensor([[0.0, 3.0, 4.0, 3.5, -1.0]])
    options: dict[str, Any] = {"repetition_penalty": 2.0, "min_new_tokens": 1}
    greedy = SamplingParams(4, 0, top_k=1, top_p=0.1, **options)
    # Token 2 is held back, 3 is in the prompt: 3.5 / 2 < 3. Then, without the two, token 2.
    tokens, logps = draw(greedy, logits, [(3,)])
    assert tokens.tolist() == [1] and logps.item() == pytest.approx(logits.log_softmax(-1)[0, 1].item())
    assert draw(SamplingParams(4, 0), logits, [(3,)])[0].tolist() == [2]
    # A negative logit is multiplied: of -1 and -2, the first becomes -3.
    negative = torch.tensor([[-1.0, -2.0]])
    assert draw(SamplingParams(4, 0, repetition_penalty=3.0), negative, [(0,)])[0].tolist() == [1]


def test_min_new_tokens_holds_back_until_there_are_so_many() -> None:
    logits = torch.zeros(1, 8).index_fill(1, torch.tensor(EOS), 50.0)
    params = SamplingParams(4, 0, min_new_tokens=2)
    assert [draw(params, logits, [(1,)], step)[0].item() in EOS for step in (0, 1, 2, 3)] == [0, 0, 1, 1]


def test_cumulative_distributions_are_inverted() -> None:
    # Cumulative 0, .5, .75, 1 for tokens 1, 2, 4; tokens of probability 0 are never drawn.
    logps = torch.tensor([0.0, 0.5, 0.25, 0.0, 0.25]).log()
    numbers = torch.tensor([0.0, 0.499, 0.501, 0.749, 0.751, 0.999], dtype=torch.float64)
    assert invert(logps.expand(6, -1), numbers).tolist() == [1, 1, 2, 2, 4, 4]


def test_random_numbers_by_hand() -> None:
    # BLAKE2 of the tuple's text seeds SplitMix64, whose second output is (state + 2 · golden ratio) mixed.
    ours = uniforms([(5, 6), (7,)], range(2, 4), SamplingParams(3, seed=11))
    key = hashlib.blake2b(repr((11, (7,), 3)).encode(), digest_size=8).digest()
    z = (int.from_bytes(key, "little") + 2 * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    z ^= z >> 31
    assert ours.shape == (4, 3) and ours[3, 1] == (z >> 11) / 2**53
    assert ours.unique().numel() == 12


def test_rows_are_drawn_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, params = random_logits(10, 40), SamplingParams(1, repetition_penalty=1.2, seed=4)
    prompts = [(i, i + 1) for i in range(5)]
    tokens, logps = draw(params, logits, prompts)
    monkeypatch.setattr("rlhf_models.language_model.head.CHUNK_BYTES", 4 * 3 * 40)
    for whole, chunked in zip((tokens, logps), draw(params, logits, prompts), strict=True):
        assert torch.equal(whole, chunked)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (lambda row: row[:-1], "wrong_logits_shape"),
        (lambda row: row - torch.inf, "no_possible_token"),
        (lambda row: row * torch.nan, "no_possible_token"),
    ],
)
def test_broken_logits_processors_are_named(answer: Any, code: str) -> None:
    def broken(completion: list[int], row: torch.Tensor) -> torch.Tensor:
        return answer(row)

    with raises_error(code):
        draw(SamplingParams(4, logits_processors=(broken,)), random_logits(2, 40), [(1,)], step=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("stop", "text"),
        ("stop", ("a", "")),
        ("min_new_tokens", -1),
        ("min_new_tokens", 9),
    ],
)
def test_values_outside_their_ranges_are_refused(field: str, value: Any) -> None:
    with raises_error("invalid_value", key=field):
        values: dict[str, Any] = {"max_new_tokens": 8} | {field: value}
        SamplingParams(**values)
