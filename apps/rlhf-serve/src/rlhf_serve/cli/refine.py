"""Drafts, critiques and rewrites over a file of prompts, row by row, resumable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from rlhf_data import UserError, invalid_value
from rlhf_infer import (
    EngineCritic,
    IterativeRefiner,
    Refinement,
    RefinerRules,
    RefinerTemplates,
    SamplingCost,
)
from rlhf_infer.rewards import load_principle_texts
from rlhf_serve.backends.transformers import load_engine
from rlhf_serve.cli.display import Display
from rlhf_serve.cli.files import sampling_params
from rlhf_serve.cli.load import load_parts
from rlhf_serve.cli.output import Work, write_rows
from rlhf_serve.service.tokenization import give_template
from rlhf_serve.settings import RefineSettings


def refine(settings: RefineSettings) -> None:
    """Write what became of every prompt, after those that the output has already."""
    if settings.backend == "vllm":
        raise invalid_value(
            "drafts are refined with the transformers backend; take --backend transformers or auto", "backend"
        )
    rules, templates = _rules(settings), RefinerTemplates(**settings.templates)
    principles = settings.principles
    if isinstance(principles, str):
        principles = load_principle_texts(principles)
    if not settings.reward and settings.model is not None and rules.needs_scores:
        raise UserError(
            "nothing scores the drafts; give --reward-model, or take --keep last and --until no_change, "
            "verdict or never",
            code="missing_scorer",
        )

    def load(display: Display, done: int) -> tuple[Work, Callable[[], None]]:
        del done
        refiner, close = _refiner(settings, rules, templates, principles, display)

        def work(
            rows: Sequence[dict[str, Any]], columns: dict[str, list[Any]]
        ) -> list[tuple[list[dict[str, Any]], SamplingCost]]:
            found = refiner.refine([row["prompt"] for row in rows], columns)
            return [([row | _added(each)], each.cost) for row, each in zip(rows, found, strict=True)]

        return work, close

    costs = write_rows(settings, load)
    if costs:
        cost = SamplingCost.total(costs)
        made = f"{len(costs)} prompts, {cost.samples} drafts and critiques, {cost.completion_tokens} tokens"
        Display().say(f"{made}; written to {settings.output_path}")


def _rules(settings: RefineSettings) -> RefinerRules:
    rules = RefinerRules(settings.rounds, settings.until, settings.keep, settings.min_gain)
    return rules if settings.verdict is None else dataclasses.replace(rules, verdict=settings.verdict)


def _refiner(
    settings: RefineSettings,
    rules: RefinerRules,
    templates: RefinerTemplates,
    principles: Sequence[str],
    display: Display,
) -> tuple[IterativeRefiner, Callable[[], None]]:
    """The refiner, and what closes its engines."""
    parts = load_parts(settings, display.say, display.building)
    params = sampling_params(settings)
    engine = load_engine(settings, parts.model)
    give_template(engine.tokenizer, parts.chat_template)
    writer, longest = engine, settings.critic_max_tokens or settings.max_tokens
    if settings.critic is not None:
        display.say(f"critic: {settings.critic}")
        writer = load_engine(
            settings.model_copy(update={"draft": None, "draft_model": None}), settings.critic
        )
        give_template(writer.tokenizer, parts.chat_template)
    critic = EngineCritic(
        writer, writer.tokenizer, dataclasses.replace(params, max_new_tokens=longest), templates
    )
    refiner = IterativeRefiner(
        engine,
        engine.tokenizer,
        params=params,
        critic=critic,
        principles=principles,
        scorer=parts.rewards,
        rules=rules,
        templates=templates,
    )

    def close() -> None:
        for each in {id(engine): engine, id(writer): writer}.values():
            each.close()

    return refiner, close


def _added(refinement: Refinement) -> dict[str, Any]:
    """The columns added to a row; the draft that is kept is the first of the candidates."""
    final = refinement.final
    others = [draft for place, draft in enumerate(refinement.drafts) if place != refinement.kept]
    return {
        "completion": final.text,
        "score": final.score,
        "finish_reason": final.finish_reason,
        "first_draft": refinement.drafts[0].text,
        "drafts": [dataclasses.asdict(draft) for draft in refinement.drafts],
        "candidates": [
            {"text": draft.text, "score": draft.score, "finish_reason": draft.finish_reason}
            for draft in (final, *others)
        ],
        "samples": refinement.cost.samples,
        "completion_tokens": refinement.cost.completion_tokens,
    }
