"""The field `search` of requests: a tree search in place of best-of-N."""

from __future__ import annotations

from typing import Any

from rlhf_data import UserError
from rlhf_infer import SamplingParams, SearchSettings, check_search_settings
from rlhf_serve.errors import invalid_request, refused
from rlhf_serve.openai.constraints import constraint_field
from rlhf_serve.openai.schema import Generation

_NOT_FOR_REQUESTS = {
    "selection": "give selection beside search",
    "aggregate": "the server's process reward model decides how scores of steps become one",
}
_COUNTS = ("best_of", "stop_early", "budget")
_UNSEEN = ("logprobs", "top_logprobs")


def search_of(body: Generation, scored: bool, limit: int) -> SearchSettings | None:
    """How the trees of a request are searched; None to draw whole candidates.

    `limit`: tokens that best-of-N of a prompt may take here. A default above it is lowered to it, which the
    answer's usage shows; what a request names is refused.

    Raises:
        APIError: 400; the field is named.
    """
    if body.search is None:
        return None
    if not scored:
        raise invalid_request(
            "a search chooses by scores and this server has no reward; start it with --reward-model", "search"
        )
    _check_other_fields(body)
    settings = _settings(body)
    if "budget_tokens" not in settings.model_fields_set:
        settings = settings.model_copy(update={"budget_tokens": min(settings.budget_tokens, limit)})
    for name in ("budget_tokens", "width"):
        if name in settings.model_fields_set and (value := getattr(settings, name)) > limit:
            raise invalid_request(
                f"search.{name} is {value}; for this prompt the server allows up to {limit}", "search"
            )
    return settings


def _check_other_fields(body: Generation) -> None:
    """Refuse fields that have no meaning beside a search."""
    if body.selection == "none":
        raise invalid_request("a search returns its best completions; leave selection none out", "selection")
    for name in _COUNTS:
        if getattr(body, name) not in (None, False):
            raise invalid_request(
                f"{name} counts whole candidates, which a search does not draw; give search.budget_tokens",
                name,
            )
    for name in _UNSEEN:
        if getattr(body, name, None) not in (None, False):
            raise invalid_request(f"a search keeps no alternatives of tokens; leave {name} out", name)


def _settings(body: Generation) -> SearchSettings:
    given: dict[str, Any] = (
        {"strategy": body.search} if isinstance(body.search, str) else dict(body.search or {})
    )
    for name, instead in _NOT_FOR_REQUESTS.items():
        if name in given:
            raise invalid_request(f"search has no {name} in a request: {instead}", "search")
    known = sorted(set(SearchSettings.model_fields) - set(_NOT_FOR_REQUESTS))
    if unknown := sorted(set(given).difference(known)):
        raise invalid_request(f"search has no {unknown[0]!r}; expected {', '.join(known)}", "search")
    try:
        return SearchSettings.from_dict(given | {"selection": body.selection or "best"}, "search")
    except UserError as error:
        raise refused(error, "search") from error


def check_drawn_by_steps(body: Generation, settings: SearchSettings, params: SamplingParams) -> None:
    """Refuse ways to draw completions that do not go with a search.

    Raises:
        APIError: 400; the field is named.
    """
    try:
        check_search_settings(settings, params, extract=str)
    except UserError as error:
        own = str(error.fields.get("key", "search"))
        name = {"constraint": constraint_field(body), "min_new_tokens": "min_tokens"}.get(own, own)
        raise invalid_request(str(error).replace(own, name), name, error.code) from error
