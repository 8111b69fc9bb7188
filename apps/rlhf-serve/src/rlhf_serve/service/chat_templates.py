"""Chat template arguments of requests: only switches that the template reads."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, TemplateError, meta
from jinja2.ext import loopcontrols

from rlhf_serve.errors import invalid_request

_PARAM = "chat_template_kwargs"
_MOST, _LONGEST = 32, 1024
"""Arguments, and characters of one."""
_GIVEN = ("messages", "raise_exception", "strftime_now")
"""Variables that transformers gives a template besides the arguments of `apply_chat_template`."""
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Marks that only transformers knows."""


def switches_of(tokenizer: Any) -> frozenset[str]:
    """Names that a tokenizer's chat template reads and that transformers does not give it itself.

    A template that cannot be parsed has none; a request with messages is answered with what is wrong with it.
    """
    templates = getattr(tokenizer, "chat_template", None)
    if not templates:
        return frozenset()
    environment = Environment(extensions=[loopcontrols], autoescape=True)  # for parsing; it renders nothing
    found: set[str] = set()
    for template in templates.values() if isinstance(templates, Mapping) else [templates]:
        try:
            found |= meta.find_undeclared_variables(environment.parse(_GENERATION.sub("", template)))
        except TemplateError:
            continue
    given = {*_GIVEN, *inspect.signature(tokenizer.apply_chat_template).parameters}
    given |= {*tokenizer.special_tokens_map}
    return frozenset(found - given)


def template_text(chat_template: Any, *, tools: bool = False) -> str:
    """The text of a tokenizer's chat template; of several the one that is used, with `tools` or without."""
    if isinstance(chat_template, Mapping):
        chat_template = chat_template.get("tool_use" if tools else "default", chat_template.get("default"))
    return chat_template or ""


def check_switches(arguments: Mapping[str, Any], switches: frozenset[str]) -> None:
    """Refuse what is not a switch: names that the template does not read, values that are lists or long.

    A client's own template could compute without end.

    Raises:
        APIError: 400; the argument is named.
    """
    if len(arguments) > _MOST:
        raise invalid_request(f"{_PARAM} has {len(arguments)} arguments; expected at most {_MOST}", _PARAM)
    for name, value in arguments.items():
        shown = name if len(name) <= 64 else f"{name[:61]}..."
        where = f"{_PARAM}.{shown}"
        if name not in switches:
            known = ", ".join(sorted(switches)) or "no arguments"
            raise invalid_request(f"the model's chat template takes {known}, not {shown!r}", where)
        if not isinstance(value, str | int | float | None):
            raise invalid_request(f"{where} must be a text, a number, true, false or null", where)
        if isinstance(value, str) and len(value) > _LONGEST:
            raise invalid_request(f"{where} has {len(value)} characters; expected at most {_LONGEST}", where)
