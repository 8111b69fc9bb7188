"""Completions that were criticised and rewritten: the templates, the rules, and pairs of what came of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rlhf_data import Text, UserError, as_completion, check_choice, invalid_value
from rlhf_infer.sampling.candidates import SamplingCost

Keep = Literal["best", "last"]
Until = Literal["score", "no_change", "verdict", "never"]
_NEEDED = {"critique": "answer", "refine": "critique", "chat_refine": "critique"}
_FIELDS = {
    "critique": ("prompt", "answer", "principle"),
    "refine": ("prompt", "answer", "critique"),
    "chat_critique": ("principle",),
    "chat_refine": ("critique",),
}


@dataclass(frozen=True)
class RefinerTemplates:
    """How critiques and rewrites are asked for.

    Args:
        critique: the prompt of a critique, from `{prompt}`, `{answer}` and `{principle}`.
        refine: the prompt of a rewrite, from `{prompt}`, `{answer}` and `{critique}`.
        chat_critique: the user's message that asks for a critique, after a chat and the assistant's draft;
            from `{principle}`.
        chat_refine: the same for a rewrite, from `{critique}`.

    Raises:
        UserError: a template has another field, or lacks the draft or the critique that it is about.
    """

    critique: str = "{prompt}{answer}\n\nWhat is wrong with this answer? {principle}\n"
    refine: str = "{prompt}{answer}\n\nCritique: {critique}\n\nThe answer without these faults:\n"
    chat_critique: str = "What is wrong with your last answer? {principle}"
    chat_refine: str = "Answer again, without the faults that this critique names: {critique}"

    def __post_init__(self) -> None:
        for name, fields in _FIELDS.items():
            text, needed = getattr(self, name), _NEEDED.get(name)
            try:
                given = text.format(**{field: f"<{field}>" for field in fields})
                if needed and f"<{needed}>" not in given:
                    raise KeyError(needed)
            except (AttributeError, KeyError, IndexError, ValueError) as error:
                others = ", ".join(f"{{{field}}}" for field in fields)
                with_it = f" with {{{needed}}}" if needed else ""
                raise UserError(
                    f"template {name} is {text!r}; expected a text{with_it}, and no braces but {others}",
                    code="invalid_template",
                    key=name,
                ) from error

    def ask(self, kind: Literal["critique", "refine"], prompt: Text, answer: str, **fields: str) -> Text:
        """Prompt for the model: a text, or a chat that goes on from the draft."""
        if isinstance(prompt, str):
            return getattr(self, kind).format(prompt=prompt, answer=answer, **fields)
        asked = getattr(self, f"chat_{kind}").format(**fields)
        return [*prompt, {"role": "assistant", "content": answer}, {"role": "user", "content": asked}]


@dataclass(frozen=True)
class Draft:
    """A completion in a refinement.

    Args:
        text: the completion.
        critique: what was said of the draft before it; empty for the first.
        principle: the principle that the critique was about; empty without principles.
        score: the scorer's; None without one.
        finish_reason: as in `Rollout`.
    """

    text: str
    critique: str = ""
    principle: str = ""
    score: float | None = None
    finish_reason: str = "stop"


@dataclass(frozen=True)
class Refinement:
    """Result of refining the answer to a prompt.

    Args:
        prompt: text or messages.
        drafts: in their order; the first one was written without a critique.
        kept: the place in `drafts` of the one that is kept.
        cost: what drafts and critiques cost.
    """

    prompt: Text
    drafts: tuple[Draft, ...]
    kept: int
    cost: SamplingCost

    @property
    def final(self) -> Draft:
        """The draft that is kept."""
        return self.drafts[self.kept]


@dataclass(frozen=True)
class RefinerRules:
    """How many rounds there are, and which draft is kept.

    Args:
        max_rounds: rewrites of a prompt at most; 0 leaves the first draft.
        until: what ends a prompt's rounds earlier: `score`: the rewrite is not the best so far; `no_change`:
            it is the draft before; `verdict`: the critique matches `verdict`; `never`: nothing.
        keep: the draft that is kept: the `best` by score, or the `last`.
        min_gain: a draft is better than an earlier one only if its score is higher by more than this.
        verdict: a regular expression for critiques that find nothing; it is looked for anywhere, in any case.

    Raises:
        UserError: a value out of its range.
    """

    max_rounds: int = 3
    until: Until = "never"
    keep: Keep = "best"
    min_gain: float = 0.0
    verdict: str = r"\bno (?:faults?|problems?|issues?)\b|\bnothing (?:is )?wrong\b"

    def __post_init__(self) -> None:
        for name, choices in (("until", Until), ("keep", Keep)):
            check_choice(name, getattr(self, name), get_args(choices))
        for name in ("max_rounds", "min_gain"):
            if not getattr(self, name) >= 0:
                raise invalid_value(f"{name} is {getattr(self, name)}; expected at least 0", name)
        try:
            if re.compile(self.verdict).search(""):
                raise re.error("it matches the empty text")
        except re.error as error:
            raise invalid_value(
                f"verdict is {self.verdict!r}, which finds no verdict ({error}); give a regular expression",
                "verdict",
            ) from error

    @property
    def needs_scores(self) -> bool:
        """Whether drafts must be scored."""
        return self.keep == "best" or self.until == "score"

    def finds_nothing(self, critique: str) -> bool:
        """Whether a critique ends the rounds."""
        return self.until == "verdict" and bool(re.search(self.verdict, critique, re.IGNORECASE))

    def goes_on(self, drafts: Sequence[Draft]) -> bool:
        """Whether there is another round after the last of at least two drafts."""
        if self.until == "no_change":
            return drafts[-1].text != drafts[-2].text
        return self.until != "score" or self.best(drafts) == len(drafts) - 1

    def best(self, drafts: Sequence[Draft]) -> int:
        """The place of the best draft, of equal ones the earliest."""
        best = 0
        for place, draft in enumerate(drafts):
            before = drafts[best].score
            if draft.score is not None and (before is None or draft.score > before + self.min_gain):
                best = place
        return best

    def kept(self, drafts: Sequence[Draft]) -> int:
        """The place of the draft that is kept."""
        return self.best(drafts) if self.keep == "best" else len(drafts) - 1


def preference_rows(refinements: Sequence[Refinement], *, min_gap: float = 0.0) -> list[dict[str, Any]]:
    """Pairs for preference learning: the draft that was kept over the first one.

    Args:
        refinements: of `IterativeRefiner.refine`.
        min_gap: the kept one's score is higher by more than that; not asked where there are no scores.

    Returns:
        Rows with `prompt`, `chosen` and `rejected`; none of prompts whose first draft stayed as it was.
    """
    rows = []
    for each in refinements:
        first, final = each.drafts[0], each.final
        known = first.score is not None and final.score is not None
        if final.text == first.text or (known and final.score - first.score <= min_gap):  # pyright: ignore
            continue
        chosen, rejected = (as_completion(each.prompt, draft.text) for draft in (final, first))
        rows.append({"prompt": each.prompt, "chosen": chosen, "rejected": rejected})
    return rows
