"""Completions in a given form (a JSON schema, a regular expression, a grammar): the tokens that it allows.

What a grammar cannot hold a completion to is refused, never passed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rlhf_data import UserError

ConstraintKind = Literal["json_schema", "regex", "choice", "grammar", "structural_tag"]
_CACHE_BYTES = 1 << 28
"""Of the compiled grammars that are kept for later requests."""
_MOST_BLANKS = 8
"""Blanks in a row between the parts of a JSON text; a weak model could else write nothing but blanks."""
_LONGEST: dict[str, int] = {"regex": 1 << 12, "grammar": 1 << 14}
_LONGEST_OTHER = 1 << 16
"""Characters of a constraint: compiling takes seconds at these lengths, and nothing can break it off."""
_LONGEST_TEXT = 1000
"""Characters of a text that alternatives may begin with: the time grows with more than their square."""
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
"""A text in a grammar."""
_ANY_CHARACTER, _CHARACTER = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\\r\n]"
"""In xgrammar's text: a character of a string with minLength or maxLength as it is, and as JSON has it."""
_REASON = 200
"""Characters of the compiler's reason that a message shows."""

_NEVER = frozenset(
    (
        *("contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "maxContains"),
        *("minContains", "not", "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
        *("additionalItems", "$dynamicRef", "$recursiveRef"),
    )
)
_DETAILS = (
    *("format", "maxLength", "minLength", "pattern"),
    *("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"),
    *("additionalProperties", "maxProperties", "minProperties", "patternProperties", "properties"),
    *("propertyNames", "required"),
    *("items", "maxItems", "minItems", "prefixItems"),
)
"""Keywords that go with a type."""
_COUNTS = {"maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"}
_WHOLE = ("$ref", "allOf", "anyOf", "const", "enum", "oneOf")
"""Keywords that say all of a schema."""
_NAMED = ("$defs", "definitions", "patternProperties", "properties")
"""Keywords whose values are schemas under names of the client's choice."""
_DEEPEST = 64
_ALONE = (("pattern", "format", "minLength"), ("pattern", "format", "maxLength"))
_INFERRED = ("properties", "items", "prefixItems")
"""Keywords from which the type follows."""


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

    Raises:
        UserError: xgrammar is missing.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, ends: Sequence[int]) -> None:
        xgrammar = _xgrammar()
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size, stop_token_ids=list(ends)
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_CACHE_BYTES)

    def compile(self, constraint: Constraint) -> Any:
        """The grammar of a constraint; safe to be called from several threads.

        Raises:
            UserError: it is malformed or too long, or asks for what is not enforced.
        """
        _check_length(constraint)
        with _refusing(constraint):
            if constraint.kind in _HOLDS_SCHEMAS:
                return self._compiler.compile_grammar(_HOLDS_SCHEMAS[constraint.kind](constraint.value))
            if constraint.kind == "choice":
                return self._compiler.compile_grammar(_choice_grammar(json.loads(constraint.value)))
            return getattr(self._compiler, f"compile_{constraint.kind}")(constraint.value)


def schema_as_grammar(constraint: Constraint) -> str | None:
    """The text of the grammar of a JSON schema or structural tag, for engines that take grammars.

    None for another kind, which engines compile as ours does.

    Raises:
        UserError: as of `Grammars` and `Grammars.compile`.
    """
    if constraint.kind not in _HOLDS_SCHEMAS:
        return None
    _check_length(constraint)
    with _refusing(constraint):
        return str(_HOLDS_SCHEMAS[constraint.kind](constraint.value))


def _xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise UserError(
            "completions of a given form need xgrammar: pip install 'rlhf-infer[grammar]'",
            code="missing_package",
        ) from error
    return xgrammar


def _schema_grammar(schema: str) -> Any:
    check_schema(json.loads(schema))
    made = _xgrammar().Grammar.from_json_schema(schema, strict_mode=False, max_whitespace_cnt=_MOST_BLANKS)
    return _without_control_characters(made)


def _tag_grammar(tag: str) -> Any:
    return _without_control_characters(_xgrammar().Grammar.from_structural_tag(tag))


_HOLDS_SCHEMAS = {"json_schema": _schema_grammar, "structural_tag": _tag_grammar}


def _without_control_characters(grammar: Any) -> Any:
    """A grammar whose strings with a length are valid JSON; xgrammar allows control characters in them."""
    text = str(grammar)
    valid = text.replace(_ANY_CHARACTER, _CHARACTER)
    return grammar if valid == text else _xgrammar().Grammar.from_ebnf(valid)


@contextmanager
def _refusing(constraint: Constraint) -> Iterator[None]:
    """Make what xgrammar raises a UserError."""
    try:
        yield
    except UserError:
        raise
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(error).rpartition(".cc:")[2].partition(" ")[2] or str(error)
        raise UserError(
            f"the {_name(constraint)} cannot be used: {reason.strip()[:_REASON]}",
            code="invalid_grammar",
            kind=constraint.kind,
        ) from error


def _name(constraint: Constraint) -> str:
    return constraint.kind.replace("_", " ")


def _check_length(constraint: Constraint) -> None:
    """Refuse what would compile for long."""
    name = _name(constraint)
    limit = _LONGEST.get(constraint.kind, _LONGEST_OTHER)
    if len(constraint.value) > limit:
        raise UserError(
            f"the {name} has {len(constraint.value):,} characters; expected at most {limit:,}",
            code="invalid_grammar",
            kind=constraint.kind,
        )
    if constraint.kind == "choice":
        texts = json.loads(constraint.value)
    else:
        texts = _QUOTED.findall(constraint.value) if constraint.kind == "grammar" else ()
    longest = max(map(len, texts), default=0)
    if longest > _LONGEST_TEXT:
        raise UserError(
            f"the {name} has a text of {longest:,} characters; expected at most {_LONGEST_TEXT:,}",
            code="invalid_grammar",
            kind=constraint.kind,
        )


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


def check_schema(schema: Any, where: str = "the json schema", depth: int = 0) -> None:
    """Refuse a schema that asks for what a grammar does not enforce.

    Args:
        schema: parsed from JSON.
        where: what it is called in messages.
        depth: schemas around it.

    Raises:
        UserError: `invalid_grammar`; the keyword is named.
    """
    if isinstance(schema, bool):
        return
    if depth > _DEEPEST:
        raise _refused(f"the json schema is nested more than {_DEEPEST} deep; make it flatter")
    if not isinstance(schema, Mapping):
        raise _refused(f"{where} must be an object, true or false")
    for key in sorted(_NEVER & schema.keys()):
        raise _refused(f"{where} has the keyword {key}, which is not enforced; leave it out")
    try:
        _check_whole(schema, where)
        _check_types(schema, where)
        _check_properties(schema, where)
    except TypeError as error:
        raise _refused(f"{where} has a keyword with a value of another type ({error}); correct it") from error
    for place, each in _within(schema):
        check_schema(each, f"{where}.{place}", depth + 1)


def _within(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas within a schema, and their places."""
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            yield from ((f"{key}.{name[:64]}", each) for name, each in value.items())
        elif key in ("additionalProperties", "items", "propertyNames"):
            yield key, value
        elif key in ("allOf", "anyOf", "oneOf", "prefixItems") and isinstance(value, list):
            yield from ((f"{key}[{i}]", each) for i, each in enumerate(value))


def _check_whole(schema: Mapping[str, Any], where: str) -> None:
    """A reference, an enumeration or alternatives stand alone; of alternatives that all hold there is one."""
    whole = [key for key in _WHOLE if key in schema]
    others = [key for key in (*whole[1:], *_DETAILS) if key in schema]
    if whole and others:
        raise _refused(f"{where} has {whole[0]} and {others[0]}, of which one is not enforced; give one")
    if len(schema.get("allOf", [1])) > 1:
        raise _refused(f"{where} has allOf with several schemas, which is not enforced; write them as one")
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise _refused(f"{where} has a $ref to another document; expected one that begins with #")


def _check_types(schema: Mapping[str, Any], where: str) -> None:
    """Keywords go with their type, and some not with each other."""
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types
    known = any(key in schema for key in _INFERRED)
    details = [key for key in _DETAILS if key in schema]
    if details and types is None and not known:
        raise _refused(f"{where} has {details[0]} without type; add the type")
    if "multipleOf" in schema and "number" in (types or ()):
        raise _refused(f"{where} has multipleOf for numbers, which is enforced for integers only")
    for keys in _ALONE:
        found = [key for key in keys if key in schema]
        if len(found) > 1:
            raise _refused(f"{where} has {found[0]} and {found[1]}, of which one is not enforced; give one")
    for key in _COUNTS & schema.keys():
        if not isinstance(schema[key], bool) and schema[key] < 0:
            raise _refused(f"{where} has {key} {schema[key]}; expected a number of at least 0")
    if types == []:
        raise _refused(f"{where} has no type in type")


def _check_properties(schema: Mapping[str, Any], where: str) -> None:
    """Required properties are listed, and properties are given by name or by pattern."""
    properties = schema.get("properties", {})
    if "patternProperties" in schema and properties:
        raise _refused(f"{where} has properties and patternProperties, of which one is not enforced")
    for text in (*properties, *_strings(schema.get("enum")), *_strings([schema.get("const")])):
        if len(text) > _LONGEST_TEXT:
            raise _refused(
                f"{where} has a text of {len(text):,} characters; expected at most {_LONGEST_TEXT:,}"
            )
    required = schema.get("required", [])
    if isinstance(required, list) and isinstance(properties, Mapping):
        for name in required:
            if name not in properties:
                raise _refused(f"{where} requires {str(name)[:64]!r}, which its properties do not list")


def _strings(values: Any) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


def _refused(message: str) -> UserError:
    return UserError(message, code="invalid_grammar", kind="json_schema")
