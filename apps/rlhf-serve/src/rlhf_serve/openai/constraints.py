"""The constraint that a request sets on the form of its answers, in OpenAI's fields and in vLLM's."""

from __future__ import annotations

import json
from typing import Any

from rlhf_infer import Constraint
from rlhf_serve.errors import invalid_request
from rlhf_serve.openai.schema import Generation

_LONGEST = 1 << 16
"""Characters of a constraint."""
_GUIDED = {
    "json": "guided_json",
    "regex": "guided_regex",
    "choice": "guided_choice",
    "grammar": "guided_grammar",
}
_ANY_OBJECT = {"type": "object"}


def constraint_of(body: Generation) -> Constraint | None:
    """The constraint on the form of the answers; None for any form.

    Raises:
        APIError: 400; the field is named.
    """
    found: dict[str, Constraint] = {}
    response = body.response_format
    if response is not None and response.get("type") != "text":
        found["response_format"] = _of_response_format(response)
    if body.structured_outputs is not None:
        given = {key: value for key, value in body.structured_outputs.items() if value not in (None, False)}
        if len(given) != 1:
            raise invalid_request(
                "structured_outputs must have one of json, regex, choice, grammar, json_object and "
                f"structural_tag; it has {', '.join(given) or 'none'}"[:_LONGEST],
                "structured_outputs",
            )
        [(kind, value)] = given.items()
        found["structured_outputs"] = _of_kind(kind, value, f"structured_outputs.{kind}")
    for kind, name in _GUIDED.items():
        if (value := getattr(body, name)) is not None:
            found[name] = _of_kind(kind, value, name)
    if len(found) > 1:
        raise invalid_request(f"give one of {' and '.join(found)}; an answer has one form", [*found][1])
    return next(iter(found.values()), None)


def constraint_field(body: Generation) -> str:
    """The field that gives the answers their form: the last that is not null, `tool_choice` if all are."""
    names = ("response_format", "structured_outputs", *_GUIDED.values())
    return next((name for name in reversed(names) if getattr(body, name) is not None), "tool_choice")


def of_schema(schema: Any, where: str) -> Constraint:
    """The constraint that a JSON schema describes.

    Raises:
        APIError: 400: it is not a JSON schema, or it is too long.
    """
    if not isinstance(schema, dict | bool):
        raise invalid_request(f"{where} must be a JSON schema, an object", where)
    return _checked(Constraint("json_schema", json.dumps(schema)), where)


def _of_response_format(response: dict[str, Any]) -> Constraint:
    kind = response.get("type")
    if kind == "json_object":
        return of_schema(_ANY_OBJECT, "response_format")
    if kind != "json_schema":
        raise invalid_request(
            "response_format.type must be text, json_object or json_schema", "response_format.type"
        )
    inner = response.get("json_schema", response)  # /v1/responses has the schema beside the type
    if not isinstance(inner, dict) or "schema" not in inner:
        raise invalid_request(
            "response_format.json_schema must have a schema", "response_format.json_schema.schema"
        )
    return of_schema(inner["schema"], "response_format.json_schema.schema")


def _of_kind(kind: str, value: Any, where: str) -> Constraint:
    if kind == "json_object":
        return of_schema(_ANY_OBJECT, where)
    if kind == "json":
        return of_schema(_parsed(value, where) if isinstance(value, str) else value, where)
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
            raise invalid_request(f"{where} must be a list of texts", where)
        return _checked(Constraint("choice", json.dumps(value)), where)
    if kind not in ("regex", "grammar", "structural_tag"):
        raise invalid_request(
            f"{where[:80]!r} is not a kind of form; expected json, regex, choice, grammar, json_object or "
            "structural_tag",
            where[:80],
        )
    if kind == "structural_tag" and isinstance(value, dict):
        value = json.dumps(value)
    if not isinstance(value, str) or not value:
        raise invalid_request(f"{where} must be a text", where)
    return _checked(Constraint(kind, value), where)


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid_request(f"{where} is not valid JSON", where) from error


def _checked(constraint: Constraint, where: str) -> Constraint:
    if len(constraint.value) > _LONGEST:
        raise invalid_request(
            f"{where} has {len(constraint.value)} characters; expected at most {_LONGEST}", where
        )
    return constraint
