"""Models of the Hugging Face hub: the files a merge needs of one, in the hub's own cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rlhf_merge.errors import MergeError
from rlhf_merge.files.weight_index import (
    ADAPTER_CONFIG,
    ADAPTER_FILES,
    WEIGHT_FILES,
    find_weights,
    read_weight_map,
)

_ID = re.compile(r"(?P<name>\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(?P<revision>[^@+\s]+))?", re.ASCII)

_SMALL_FILES = ["*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py"]
"""Configs, tokenizers and code."""
_ALWAYS = ["config.json", ADAPTER_CONFIG]
"""One is in every model: huggingface_hub warns of a request that matches nothing."""
_IGNORED = ["*/*", "optimizer*", "scheduler*", "trainer_state.json", "training_args*"]


def split_id(text: str) -> tuple[str, str | None] | None:
    """Repository and revision of `name` or `org/name`, with or without `@revision`; None if it is neither."""
    match = _ID.fullmatch(text)
    return (match["name"], match["revision"]) if match else None


def download(repository: str, revision: str | None = None) -> Path:
    """The folder in the hub's cache that holds a model or an adapter, downloaded as far as it is missing.

    Fetched are configs, tokenizer, code, and the weights of one kind, safetensors if there are any.  Nothing
    of a folder inside the repository is.  `HF_ENDPOINT`, `HF_HOME`, `HF_HUB_OFFLINE` and `HF_TOKEN` work as
    ever.

    Args:
        repository: `org/name` or `name`.
        revision: branch, tag or commit; None is the main branch.

    Raises:
        MergeError: it does not exist, is gated, or is not cached and cannot be reached.
    """
    folder = _fetch(repository, revision, _SMALL_FILES)
    # The commit, so that a push in between cannot mix two versions.
    commit = folder.name
    if (folder / ADAPTER_CONFIG).is_file():
        _fetch_first(repository, commit, folder, ADAPTER_FILES)
    for index, single in WEIGHT_FILES:
        if (folder / index).is_file():
            _fetch(repository, commit, sorted(set(read_weight_map(folder / index).values())))
            return folder
        if _fetch_first(repository, commit, folder, (single,)):
            return folder
    if not (folder / ADAPTER_CONFIG).is_file() and find_weights(folder) is None:
        _fetch(repository, commit, ["*.safetensors"])
    return folder


def _fetch_first(repository: str, commit: str, folder: Path, names: tuple[str, ...]) -> bool:
    """Fetch the first of these files that the repository has, and say whether it has any."""
    for name in names:
        _fetch(repository, commit, [name])
        if (folder / name).is_file():
            return True
    return False


def _fetch(repository: str, revision: str | None, patterns: list[str]) -> Path:
    """Fetch the files of these patterns, with errors a user can act on."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when huggingface_hub is imported
    from huggingface_hub import constants, errors, snapshot_download

    label = f"{repository}@{revision}" if revision else repository
    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=[*_ALWAYS, *patterns],
                ignore_patterns=_IGNORED,
                library_name="rlhf-merge",
            )
        )
    except errors.GatedRepoError:
        raise MergeError(
            f"{label} is gated: accept its terms at {constants.ENDPOINT}/{repository} and log in with "
            "`hf auth login`, or set HF_TOKEN."
        ) from None
    except errors.RepositoryNotFoundError:
        raise MergeError(
            f"{label} is neither a folder here nor a model at {constants.ENDPOINT} that you may read; check "
            "the name, or log in with `hf auth login` if it is private."
        ) from None
    except errors.RevisionNotFoundError:
        raise MergeError(
            f"{repository} has no revision {revision!r}; name a branch, a tag or a commit."
        ) from None
    except errors.LocalEntryNotFoundError as error:
        raise MergeError(
            f"{label} is neither a folder here nor wholly in the hub's cache {constants.HF_HUB_CACHE}, and "
            f"the hub cannot be reached ({_why(error, constants.HF_HUB_OFFLINE)}); give a folder, or "
            "download the model first."
        ) from None
    except Exception as error:  # the HTTP library's own errors differ between versions of huggingface_hub
        raise MergeError(
            f"{label} could not be downloaded from {constants.ENDPOINT} ({type(error).__name__}: {error}); "
            "try again."
        ) from error


def _why(error: Exception, offline: bool) -> str:
    """Why the hub was not reached."""
    if offline:
        return "HF_HUB_OFFLINE is set"
    cause = error.__cause__
    return f"{type(cause).__name__}: {cause}" if cause else "no connection"
