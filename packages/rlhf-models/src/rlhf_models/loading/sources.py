"""Whether a named model is there: a folder, in the local cache, or on the hub; decided without torch."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

from rlhf_data import UserError

_LOG = logging.getLogger(__name__)
_TIMEOUT_S = 10.0
_HUB_STATES = {401: "is not there, or is private", 403: "is gated or private", 404: "is not there"}


def check_not_a_missing_path(name_or_path: str | Path) -> None:
    """Refuse what is written as a path, or as a hub name never is, and is not there."""
    name = str(name_or_path)
    written_as_path = name.startswith(("/", ".", "~")) or name.endswith("/") or name.count("/") > 1
    if written_as_path and not Path(name).exists():
        raise UserError(
            f"model folder {name} does not exist; check the path, or give a name on the hub",
            code="model_not_found",
            name=name,
        )


def check_available(name_or_path: str | Path) -> None:
    """Refuse a model that is not a folder, not in the local cache and not on the hub; nothing is loaded.

    Raises:
        UserError: it is none of them, or the hub cannot be reached.
    """
    from huggingface_hub import try_to_load_from_cache

    check_not_a_missing_path(name_or_path)
    name = str(name_or_path)
    if not Path(name).exists() and not isinstance(try_to_load_from_cache(name, "config.json"), str):
        check_on_hub(name)


@functools.cache
def check_on_hub(name: str) -> None:
    """Ask the hub for a model, once and for at most 10 s, before libraries try for longer."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    _LOG.info("model %s: no such folder, and not in the local cache; asking the Hugging Face hub", name)
    try:
        HfApi().model_info(name, timeout=_TIMEOUT_S)
    except (HfHubHTTPError, HFValidationError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = _HUB_STATES.get(status or 0, str(error).strip().partition("\n")[0])
        raise UserError(
            f"model {name!r} is not a folder and not in the local Hugging Face cache, and on the hub it "
            f"{reason}; check the name, log in with `hf auth login`, or give a model folder",
            code="model_not_found",
            name=name,
        ) from error
    except Exception as error:  # of the transport, whose library is the hub client's choice
        raise UserError(
            f"model {name!r} is not a folder, not in the local Hugging Face cache, and could not be fetched "
            f"from the hub ({error}); check the name and the connection, or give a model folder",
            code="model_unreachable",
            name=name,
        ) from error
