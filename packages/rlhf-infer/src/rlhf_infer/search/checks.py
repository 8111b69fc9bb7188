"""Checks of a search: settings that do not go together, and trees of another search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_data import Text, UserError, invalid_value
from rlhf_infer.engines.protocol import SamplingParams
from rlhf_infer.sampling.candidates import Extract, check_extract
from rlhf_infer.search.settings import SearchSettings
from rlhf_infer.search.tree import SearchTree
from rlhf_infer.search.treequest import imported as imported_treequest


def check_search_settings(
    settings: SearchSettings, params: SamplingParams, extract: Extract | None, *, separator: str | None = None
) -> None:
    """Refuse settings that conflict with each other or with a search by steps, or need a missing package.

    `separator` is the text that ends a step; None for that of the settings, if they name one.
    """
    separator = separator or settings.separator or ""
    if settings.strategy == "ab-mcts":
        imported_treequest()
    check_extract(settings.selection, extract)
    greedy = settings.strategy in ("beam", "dvts") and settings.width == settings.rounds == 1
    if params.temperature == 0 and not greedy:
        raise invalid_value(
            "temperature is 0, so that all steps drawn after a path are the same; raise it, or search by "
            "beam with width 1 in one round, which is greedy decoding",
            "temperature",
        )
    if settings.strategy != "best-of-n" and any(stop in separator for stop in params.stop):
        raise UserError(
            f"the separator of steps {separator!r} contains a stop text, so that the first step "
            "would end every completion; change one of them",
            code="conflicting_options",
        )
    refused = {
        "constraint": params.constraint is not None,
        "logits_processors": bool(params.logits_processors),
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
        "min_new_tokens": params.min_new_tokens > 0,
        "ignore_eos": params.ignore_eos,
    }
    for name, given in refused.items():
        if given:
            raise UserError(
                f"{name} counts from a completion's first token, and a search draws it step by step; leave "
                f"{name} out",
                code="unsupported_setting",
                key=name,
            )


def check_resumed(
    trees: Sequence[SearchTree],
    prompts: Sequence[Text],
    ids: Sequence[Sequence[int]],
    made_with: Mapping[str, Any],
) -> None:
    """Refuse trees that are not of these prompts, tokens (`ids`) and settings."""
    if len(trees) != len(prompts):
        raise UserError(
            f"there are {len(trees)} trees to resume for {len(prompts)} prompts; give one each",
            code="different_config",
        )
    for i, (tree, prompt, own) in enumerate(zip(trees, prompts, ids, strict=True)):
        if (tree.prompt, tree.prompt_ids) != (prompt, tuple(own)):
            raise UserError(
                f"tree {i} to resume is of another prompt or tokenizer; give the trees in the order of the "
                "prompts",
                code="different_config",
            )
        for name, value in made_with.items():
            if tree.made_with.get(name) != value:
                raise UserError(
                    f"tree {i} to resume was made with {name}={tree.made_with.get(name)!r}, now it is "
                    f"{value!r}; give the same, or start anew",
                    code="different_config",
                    key=name,
                )
