"""Best-of-N over a file of prompts, row by row, resumable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlhf_data import UserError
from rlhf_infer import (
    AdaptiveComputeAllocator,
    BestOfNSampler,
    ConfidenceBasedStopping,
    SamplingCost,
    Selected,
    extractor,
)
from rlhf_infer.sampling.candidates import VOTES
from rlhf_serve.backends.transformers import load_engine, wants_vllm
from rlhf_serve.cli.display import Display
from rlhf_serve.cli.load import Parts, load_parts
from rlhf_serve.cli.output import Work, sampling_params, write_rows
from rlhf_serve.service.tokenization import give_template
from rlhf_serve.settings import BatchSettings


def generate(settings: BatchSettings) -> None:
    """Write the best completion of every prompt, after those that the output has already."""

    def load(display: Display) -> tuple[Work, Callable[[], None]]:
        sampler, close = _sampler(settings, load_parts(settings, display.say, display.building))

        def work(
            rows: Sequence[dict[str, Any]], columns: dict[str, list[Any]]
        ) -> list[tuple[dict[str, Any], SamplingCost]]:
            found = sampler.sample([row["prompt"] for row in rows], columns)
            return [(_added(each, settings), each.cost) for each in found]

        return work, close

    costs = write_rows(settings, load)
    if costs:
        Display().say(_summary(costs, settings.output_path))


def _sampler(settings: BatchSettings, parts: Parts) -> tuple[BestOfNSampler, Any]:
    """The sampler, and the function that closes it."""
    if wants_vllm(settings):
        from rlhf_infer import VLLMEngine
        from rlhf_models import load_tokenizer
        from rlhf_serve.backends.vllm import full_model, vllm_settings

        folder, temporary = full_model(parts.model)
        tokenizer = load_tokenizer(folder)
        engine: Any = VLLMEngine(folder, tokenizer, vllm_settings(settings))

        def close() -> None:
            engine.close()
            if temporary is not None:
                temporary.cleanup()
    else:
        engine = load_engine(settings, parts.model)
        tokenizer, close = engine.tokenizer, engine.close
    give_template(tokenizer, parts.chat_template)
    sampler = BestOfNSampler(
        engine,
        parts.rewards,
        tokenizer,
        n=settings.n if settings.budget is None else settings.budget,
        params=sampling_params(settings),
        selection=settings.selection,
        extract=extractor(settings.answer) if settings.selection in VOTES else None,
        adaptive=_adaptive(settings),
    )
    return sampler, close


def _adaptive(settings: BatchSettings) -> ConfidenceBasedStopping | AdaptiveComputeAllocator | None:
    """The rule for the number of candidates; initial ones take at most half of a budget."""
    budget = settings.budget
    if budget is None:
        return settings.stopping.rule(settings.n) if settings.stop_early else None
    if settings.stop_early:
        raise UserError(
            "stop_early and budget both decide how much is sampled; give one of them",
            code="conflicting_options",
        )
    if budget > settings.n:
        raise UserError(
            f"the budget is {budget} samples per prompt and n, the most of one prompt, {settings.n}; lower "
            "the budget or raise n"
        )
    return AdaptiveComputeAllocator(min_samples=max(1, min(4, budget // 2)), max_samples=settings.n)


def _added(selected: Selected, settings: BatchSettings) -> dict[str, Any]:
    best, cost = selected.best, selected.cost
    found: dict[str, Any] = {
        "completion": best.text,
        "score": best.score,
        "scores": dict(best.scores),
        "answer_found": best.answer,
        "finish_reason": best.rollout.finish_reason,
        "samples": cost.samples,
        "completion_tokens": cost.completion_tokens,
    }
    if settings.keep is not None:
        found["candidates"] = [
            {"text": each.text, "score": each.score, "finish_reason": each.rollout.finish_reason}
            for each in selected.top(settings.keep)
        ]
    return found


def _summary(costs: Sequence[SamplingCost], path: str) -> str:
    cost = SamplingCost.total(costs)
    text = f"{len(costs)} prompts, {cost.samples} candidates, {cost.completion_tokens} tokens"
    if cost.saved_samples:
        text += f"; {cost.saved_share:.0%} of the candidates saved"
    return f"{text}; written to {path}"
