"""Completions in a given form (a JSON schema, a regular expression, a grammar): the tokens that it allows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rlhf_data import UserError
from rlhf_infer.engines.json_schemas import check_schema

ConstraintKind = Literal["json_schema", "regex", "choice", "grammar", "structural_tag"]
_CACHE_BYTES = 1 << 28
"""Of the compiled grammars that are kept for later requests."""
_MOST_BLANKS = 8
"""Blanks in a row between the parts of a JSON text; a weak model could else write nothing but blanks."""
_REASON = 200
"""Characters of the compiler's reason that a message shows."""


@dataclass(frozen=True)
class Constraint:
    """The form that a completion must have.

    Args:
        kind: what `value` is.
        value: a JSON schema, a regular expression, a grammar in GBNF with the rule `root`, the JSON list of
            texts of which it must be one, or xgrammar's structural tag in JSON.
    """

    kind: ConstraintKind
    value: str


class Grammars:
    """Compiles constraints for one vocabulary, and keeps what it compiled.

    Args:
        tokenizer: the transformers tokenizer.
        vocab_size: of the logits.
        ends: end-of-sequence tokens; they are allowed where a completion may end.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, ends: Sequence[int]) -> None:
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size, stop_token_ids=list(ends)
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_CACHE_BYTES)

    def compile(self, constraint: Constraint) -> Any:
        """The grammar of a constraint; safe to be called from several threads.

        Raises:
            UserError: it is malformed, or asks for what is not enforced.
        """
        try:
            if constraint.kind == "json_schema":
                check_schema(json.loads(constraint.value))
                return self._compiler.compile_json_schema(
                    constraint.value, strict_mode=False, max_whitespace_cnt=_MOST_BLANKS
                )
            if constraint.kind == "choice":
                return self._compiler.compile_grammar(_choice_grammar(json.loads(constraint.value)))
            return getattr(self._compiler, f"compile_{constraint.kind}")(constraint.value)
        except UserError:
            raise
        except (RuntimeError, ValueError, TypeError) as error:
            reason = str(error).rpartition(".cc:")[2].partition(" ")[2] or str(error)
            raise UserError(
                f"the {constraint.kind.replace('_', ' ')} cannot be used: {reason.strip()[:_REASON]}",
                code="invalid_grammar",
                kind=constraint.kind,
            ) from error


class TokenMasks:
    """The tokens that a grammar allows next in each of B completions.

    Args:
        grammar: what `Grammars.compile` returned.
        rows: B.
        vocab_size: V.
        ends: end-of-sequence tokens.
    """

    def __init__(self, grammar: Any, rows: int, vocab_size: int, ends: Sequence[int]) -> None:
        import xgrammar

        self._matchers = [xgrammar.GrammarMatcher(grammar) for _ in range(rows)]
        self._apply = xgrammar.apply_token_bitmask_inplace
        self._bits = xgrammar.allocate_token_bitmask(rows, vocab_size)
        self._ends = torch.tensor(ends)

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only."""
        self._matchers = [self._matchers[row] for row in rows.tolist()]
        self._bits = self._bits[: len(self._matchers)]

    def masked(self, logits: Tensor, rows: slice) -> Tensor:
        """Logits (B', V) of some rows with -inf for what is not allowed; where nothing is, the end is.

        A completion that has ended is left alone.
        """
        bits = self._bits[: len(logits)]
        for i, matcher in enumerate(self._matchers[rows]):
            bits[i] = -1
            if not matcher.is_terminated():
                matcher.fill_next_token_bitmask(bits, i)
        masked = logits.clone()
        self._apply(masked, bits.to(logits.device))
        stuck = masked.amax(-1) == -torch.inf
        if stuck.any():
            masked[stuck.nonzero(), self._ends.to(logits.device)] = 0.0
        return masked

    def accept(self, tokens: Tensor) -> None:
        """Take the next tokens (B,); a row that has ended, by its form or otherwise, takes any."""
        for matcher, token in zip(self._matchers, tokens.tolist(), strict=True):
            if not matcher.is_terminated():
                matcher.accept_token(token)


def _choice_grammar(choices: Sequence[str]) -> str:
    """A grammar of some texts."""
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
