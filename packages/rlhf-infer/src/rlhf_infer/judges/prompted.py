"""Judges: the probability that an answer is true, given a question and perhaps a critique of the answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, Protocol

import torch

from rlhf_data import Encoder, TokenSequence, UserError, pack
from rlhf_infer.judges.settings import JUDGE_TEMPLATE, checked_template, fill
from rlhf_models import causal_lm, check_prompt_fits, encode_completion, encode_prompt, token_logps

_VERDICT = re.compile(r"\b(not )?(right|wrong)\b", re.IGNORECASE)


class Judge(Protocol):
    """Anything that gives the probability that answers are true."""

    def score(
        self, questions: Sequence[str], answers: Sequence[str], critiques: Sequence[str | None]
    ) -> torch.Tensor:
        """P(true) of B answers.

        Args:
            questions: B questions.
            answers: B answers.
            critiques: B critiques of the answers; None for an answer without one.

        Returns:
            (B,) in [0, 1], fp32, on the CPU, without gradients.
        """
        ...


class PromptedJudge:
    """A language model as a judge: its probabilities of yes and no after a question.

    P(true) = Σ π(y | x) / (Σ π(y | x) + Σ π(n | x)) over the spellings y of yes and n of no, x being the
    filled template (P(True) of Kadavath et al. 2022, arXiv:2207.05221), without white space around answer and
    critique; with `chat` as a user's message in the chat template, up to where the reply starts. A spelling
    may have several tokens; a prompt is computed once for all spellings, and prefixes that prompts share are
    computed once too.

    Args:
        model: a transformers causal LM, or a PeftModel around one.
        tokenizer: its tokenizer.
        template: text with the fields `{question}`, `{answer}` and `{critique}`; any may be left out.
        yes: one or several spellings of yes, each as it follows the template. None takes " yes"; with `chat`
            those of " yes", "yes", " Yes" and "Yes" that are one token, or "yes" if there is none.
        no: the same for no.
        no_critique: used for a critique that is None.
        max_tokens: budget in tokens for one forward pass; None runs all at once.
        chat: ask in the tokenizer's chat template, for a model that was tuned on chats.

    Raises:
        UserError: the template names another field, one spelling is the beginning of another, or there is no
            chat template.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        template: str = JUDGE_TEMPLATE,
        yes: str | Sequence[str] | None = None,
        no: str | Sequence[str] | None = None,
        no_critique: str = "none",
        max_tokens: int | None = None,
        chat: bool = False,
    ) -> None:
        if chat and getattr(tokenizer, "chat_template", None) is None:
            raise UserError(
                "chat is true for a judge whose tokenizer has no chat template; set chat to false, or name "
                "an instruction-tuned model",
                code="no_chat_template",
            )
        self.model = model
        self.tokenizer = tokenizer
        self.template = checked_template(template)
        self.no_critique = no_critique
        self.max_tokens, self.chat = max_tokens, chat
        if yes is None:
            yes = _reply_spellings(tokenizer, "yes") if chat else " yes"
        if no is None:
            no = _reply_spellings(tokenizer, "no") if chat else " no"
        yes, no = ([x] if isinstance(x, str) else list(x) for x in (yes, no))
        self._spellings = [encode_completion(tokenizer, text) for text in [*yes, *no]]
        self._is_yes = torch.tensor([True] * len(yes) + [False] * len(no))
        _check_spellings([*yes, *no], self._spellings)

    @torch.no_grad()
    def score(
        self, questions: Sequence[str], answers: Sequence[str], critiques: Sequence[str | None]
    ) -> torch.Tensor:
        """See `Judge.score`.

        Raises:
            UserError: a filled template does not fit the model's context.
        """
        sequences: list[TokenSequence] = []
        for question, answer, critique in zip(questions, answers, critiques, strict=True):
            text = fill(self.template, question, answer, critique, no_critique=self.no_critique)
            prompt = self._prompt_ids(text)
            sequences += [TokenSequence(prompt + spelling, len(prompt)) for spelling in self._spellings]
        logps = self._seq_logps(sequences).view(-1, len(self._spellings))
        yes, no = logps[:, self._is_yes].logsumexp(1), logps[:, ~self._is_yes].logsumexp(1)
        return torch.sigmoid(yes - no)

    def _prompt_ids(self, text: str) -> list[int]:
        if not self.chat:
            return encode_prompt(self.tokenizer, text)
        return Encoder(self.tokenizer).prompt([{"role": "user", "content": text}])

    def _seq_logps(self, sequences: list[TokenSequence]) -> torch.Tensor:
        """Log π (B,) of the scored part of each sequence."""
        lm = causal_lm(self.model)
        longest = max((len(sequence.input_ids) for sequence in sequences), default=0)
        check_prompt_fits(lm, longest, "a text for the prompted judge")
        scores = torch.zeros(len(sequences))
        for batch in pack(sequences, self.max_tokens):
            logps = token_logps(self.model, batch.to(lm.device)).logps.cpu()
            scores.index_add_(0, batch.sequence_ids[batch.score_sequence], logps)
        return scores


class RuleJudge:
    """A judge made from a Python function.

    Args:
        rule: `f(question, answer, critique) -> P(true)`, a number in [0, 1]; critique is None if there is
            none. The default is `verdict_rule`.
    """

    def __init__(self, rule: Callable[[str, str, str | None], float] | None = None) -> None:
        self.rule = rule or verdict_rule

    def score(
        self, questions: Sequence[str], answers: Sequence[str], critiques: Sequence[str | None]
    ) -> torch.Tensor:
        """See `Judge.score`.

        Raises:
            UserError: the rule returns something else than a number in [0, 1].
        """
        rows = zip(questions, answers, critiques, strict=True)
        return torch.tensor([self._apply(*row) for row in rows], dtype=torch.float32)

    def _apply(self, question: str, answer: str, critique: str | None) -> float:
        name = getattr(self.rule, "__name__", type(self.rule).__name__)
        where = f"judge rule {name}, question {question!r}, answer {answer!r}, critique {critique!r}"
        try:
            value = self.rule(question, answer, critique)
        except Exception as error:
            error.add_note(where)
            raise
        if not isinstance(value, Real) or not 0 <= value <= 1:
            raise UserError(
                f"{where}: returned {value!r}; expected a number from 0 to 1", code="invalid_score"
            )
        return float(value)


def verdict_rule(question: str, answer: str, critique: str | None) -> float:
    """Believe the critique: 1 if its last verdict word is `right`, 0 if `wrong`, 0.5 without either.

    `not` before the word negates it; case does not matter. Question and answer are ignored, so an answer
    without a critique gets 0.5.
    """
    del question, answer
    verdicts = _VERDICT.findall(critique or "")
    if not verdicts:
        return 0.5
    negated, word = verdicts[-1]
    return float((word.lower() == "right") != bool(negated))


def _reply_spellings(tokenizer: Any, word: str) -> list[str]:
    """The forms of a word that are one token each, all different; the bare word if there is none."""
    found: dict[int, str] = {}
    for text in (f" {word}", word, f" {word.title()}", word.title()):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) == 1 and ids[0] != tokenizer.unk_token_id:
            found.setdefault(ids[0], text)
    return list(found.values()) or [word]


def _check_spellings(texts: list[str], spellings: list[list[int]]) -> None:
    """Refuse spellings that are not alternatives: an empty one begins every other."""
    for i, short in enumerate(spellings):
        for j, long in enumerate(spellings):
            if i != j and long[: len(short)] == short:
                raise UserError(
                    f"the judge's spellings {texts[i]!r} and {texts[j]!r} overlap: the tokens of the first "
                    "begin the second; give yes and no spellings that differ",
                    code="overlapping_spellings",
                )
