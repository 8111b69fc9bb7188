"""The demonstration that the package contains."""

from __future__ import annotations

from rlhf_infer import BestOfNSampler, SamplingParams, TransformersEngine, load_scorer
from rlhf_models import load_causal_lm, load_tokenizer
from rlhf_serve.cli.demo import demo


def test_the_demonstration_is_small_and_its_reward_finds_what_was_seen() -> None:
    built = demo(0)
    folder = built.policy.parent
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 2e6
    engine = TransformersEngine(
        load_causal_lm(str(built.policy), dtype="float32", device="cpu"), load_tokenizer(str(built.policy))
    )
    sampler = BestOfNSampler(
        engine, load_scorer([str(built.reward)], None), engine.tokenizer, n=8, params=SamplingParams(8)
    )
    found = sampler.sample(list(built.examples))
    assert len(found) == 6 and all(each.best.text.strip() for each in found)
    assert all((each.best.score or 0) >= max(c.score or 0 for c in each.candidates) for each in found)
