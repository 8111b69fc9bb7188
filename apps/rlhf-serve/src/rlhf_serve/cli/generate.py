"""The best completions of a file of prompts, by best-of-N or tree search, row by row, resumable."""

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
    check_columns,
    extractor,
)
from rlhf_infer.sampling.best_of_n import check_best_of_n
from rlhf_infer.sampling.candidates import VOTES
from rlhf_serve.cli.display import Display
from rlhf_serve.cli.files import open_engine, prompt_rows, sampling_params
from rlhf_serve.cli.load import Parts, load_parts
from rlhf_serve.cli.output import Work, write_rows
from rlhf_serve.cli.search import TreeSampler, check_search, is_by_tree, tree_sampler
from rlhf_serve.settings import BatchSettings

Sampler = BestOfNSampler | TreeSampler


def generate(settings: BatchSettings) -> None:
    """Write the best completion of every prompt that the output does not have yet."""
    check_search(settings)
    prompts = prompt_rows(settings)

    def load(display: Display, done: int) -> tuple[Work, Callable[[], None]]:
        parts = load_parts(settings, display.say, display.building)
        sampler, close = _sampler(settings, parts, prompts, done)

        def work(
            rows: Sequence[dict[str, Any]], columns: dict[str, list[Any]]
        ) -> list[tuple[list[dict[str, Any]], SamplingCost]]:
            if parts.rewards is not None:
                check_columns({each.name: each.function for each in parts.rewards.sources}, columns)
            found = sampler.sample([row["prompt"] for row in rows], columns)
            return [
                ([row | _added(each, settings)], each.cost) for row, each in zip(rows, found, strict=True)
            ]

        return work, close

    costs = write_rows(settings, load, rows=prompts)
    if costs:
        Display().say(_summary(costs, settings))


def _sampler(
    settings: BatchSettings, parts: Parts, rows: Sequence[dict[str, Any]], done: int
) -> tuple[Sampler, Any]:
    """The sampler, and the function that closes it; its settings are checked before the engine is loaded."""
    if is_by_tree(settings):
        return tree_sampler(settings, parts, rows, done)
    options: dict[str, Any] = {
        "n": settings.n if settings.budget is None else settings.budget,
        "params": sampling_params(settings),
        "selection": settings.selection,
        "extract": extractor(settings.answer) if settings.selection in VOTES else None,
        "adaptive": _adaptive(settings),
    }
    check_best_of_n(scorer=parts.rewards, **options)
    engine, close = open_engine(settings, parts, rows, done)
    return BestOfNSampler(engine, parts.rewards, engine.tokenizer, **options), close


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
            f"the budget is {budget} samples per prompt and n, the most for one prompt, {settings.n}; lower "
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


def _summary(costs: Sequence[SamplingCost], settings: BatchSettings) -> str:
    cost, drawn = SamplingCost.total(costs), "steps" if is_by_tree(settings) else "candidates"
    text = f"{len(costs)} prompts, {cost.samples} {drawn}, {cost.completion_tokens} tokens"
    if cost.saved_samples:
        text += f"; {cost.saved_share:.0%} of the candidates saved"
    return f"{text}; written to {settings.output_path}"
