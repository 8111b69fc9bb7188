"""JSON schemas as far as a grammar can hold a completion to them; the rest is refused, never passed over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_data import UserError

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
_WHOLE = ("$ref", "allOf", "anyOf", "const", "enum", "oneOf")
"""Keywords that say all of a schema."""
_NAMED = ("$defs", "definitions", "patternProperties", "properties")
"""Keywords whose values are schemas under names of the client's choice."""
_DEEPEST = 64
_ALONE = (("pattern", "format", "minLength"), ("pattern", "format", "maxLength"))
_INFERRED = ("properties", "items", "prefixItems")
"""Keywords from which the type follows."""


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
    _check_whole(schema, where)
    _check_types(schema, where)
    _check_properties(schema, where)
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
    if types == []:
        raise _refused(f"{where} has no type in type")


def _check_properties(schema: Mapping[str, Any], where: str) -> None:
    """Required properties are listed, and properties are given by name or by pattern."""
    properties = schema.get("properties", {})
    if "patternProperties" in schema and properties:
        raise _refused(f"{where} has properties and patternProperties, of which one is not enforced")
    required = schema.get("required", [])
    if isinstance(required, list) and isinstance(properties, Mapping):
        for name in required:
            if name not in properties:
                raise _refused(f"{where} requires {str(name)[:64]!r}, which its properties do not list")


def _refused(message: str) -> UserError:
    return UserError(message, code="invalid_grammar", kind="json_schema")
