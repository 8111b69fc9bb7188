"""What judges that are asked in words are asked, and how an API is asked; imports no model code."""

from __future__ import annotations

from string import Formatter
from typing import Literal, Self

from pydantic import Field, model_validator

from rlhf_data import BaseConfig, UserError

JUDGE_TEMPLATE = (
    "Question: {question}\nAnswer: {answer}\nCritique: {critique}\nIs the answer true? Reply yes or no:"
)
"""What a judge is asked, yes or no, unless it is given a template of its own."""
NUMBER_TEMPLATE = (
    "Question: {question}\nAnswer: {answer}\nCritique: {critique}\n"
    "How probable is it that the answer is true? Reply with a whole number from 0 to 100 and nothing else:"
)
"""The same for a judge that states its probability in per cent."""

_FIELDS = ("question", "answer", "critique")


class APISettings(BaseConfig):
    """How a judge behind an API is asked, and what that costs."""

    api_key_env: str | None = "OPENAI_API_KEY"
    """Name of the environment variable that holds the API key; null for a server without keys."""
    answer: Literal["logprobs", "number"] = "logprobs"
    """`logprobs` reads those of yes and no; `number` asks for 0 to 100, for servers without log-probs."""
    timeout: float = Field(default=60.0, gt=0)
    """Seconds without an answer after which a request is given up and repeated."""
    max_retries: int = Field(default=5, ge=0)
    """Further tries of a request after a failure that may pass."""
    concurrency: int = Field(default=8, ge=1)
    """Requests under way at a time."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Most requests a minute, repeated ones included; null for no limit."""
    prompt_price: float | None = Field(default=None, ge=0)
    """Price of a million prompt tokens, in any currency; null where cost is not counted."""
    completion_price: float | None = Field(default=None, ge=0)
    """Price of a million completion tokens, in the same currency."""

    @model_validator(mode="after")
    def _both_prices(self) -> Self:
        if (self.prompt_price is None) != (self.completion_price is None):
            raise ValueError("prompt_price and completion_price go together; give both or neither")
        return self

    @property
    def default_template(self) -> str:
        """The template that asks for `answer`."""
        return JUDGE_TEMPLATE if self.answer == "logprobs" else NUMBER_TEMPLATE

    def cost(self, prompt_tokens: float, completion_tokens: float) -> float | None:
        """Price of some tokens, in the currency of the prices; None without prices."""
        if self.prompt_price is None or self.completion_price is None:
            return None
        return (prompt_tokens * self.prompt_price + completion_tokens * self.completion_price) / 1e6


def checked_template(template: str) -> str:
    """A judge's template, if it can be filled.

    Raises:
        UserError: it is malformed, or has another field than `{question}`, `{answer}` and `{critique}`.
    """
    try:
        fields = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise UserError(f"the judge's template is malformed: {error}; write a literal brace twice") from error
    if not fields <= set(_FIELDS):
        raise UserError(
            f"the judge's template has the field {{{min(fields - set(_FIELDS))}}}; "
            f"expected only {', '.join(f'{{{name}}}' for name in _FIELDS)}; write a literal brace twice"
        )
    return template


def fill(template: str, question: str, answer: str, critique: str | None, *, no_critique: str) -> str:
    """What a judge is asked about one answer, without the blanks around answer and critique.

    Texts that a model sampled, and texts that were written for it, often differ in just these.

    Args:
        template: see `checked_template`.
        question: the question.
        answer: the answer.
        critique: of the answer; None where there is none.
        no_critique: stands for None.
    """
    said = no_critique if critique is None else critique.strip()
    return template.format(question=question, answer=answer.strip(), critique=said)
