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
    commit = folder.name  # so that a push in between cannot mix two versions

    def fetched(*names: str) -> bool:
        """Whether the repository has one of these files; the first is fetched."""
        return any((_fetch(repository, commit, [name]) / name).is_file() for name in names)

    adapter = (folder / ADAPTER_CONFIG).is_file()
    if adapter:
        fetched(*ADAPTER_FILES)
    for index, single in WEIGHT_FILES:
        if (folder / index).is_file():
            return _fetch(repository, commit, sorted(set(read_weight_map(folder / index).values())))
        if fetched(single):
            return folder
    if not adapter and find_weights(folder) is None:
        _fetch(repository, commit, ["*.safetensors"])
    return folder


def _fetch(repository: str, revision: str | None, patterns: list[str]) -> Path:
    """Fetch the files of these patterns, with errors a user can act on."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when huggingface_hub is imported
    from huggingface_hub import constants, errors, snapshot_download

    label = f"{repository}@{revision}" if revision else repository
    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=[*_ALWAYS, *patterns],
            ignore_patterns=_IGNORED,
            library_name="rlhf-merge",
        )
    except errors.GatedRepoError:
        found = f"is gated: accept its terms at {constants.ENDPOINT}/{repository} and `hf auth login`"
    except errors.RepositoryNotFoundError:
        found = f"is neither a folder here nor a model at {constants.ENDPOINT} that you may read; check it"
    except errors.RevisionNotFoundError:
        found = "is not a revision of that model; name a branch, a tag or a commit"
    except errors.LocalEntryNotFoundError as error:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else error.__cause__ or "no connection"
        found = (
            f"is neither a folder here nor wholly in the hub's cache {constants.HF_HUB_CACHE}, and the hub "
            f"cannot be reached ({reason}); give a folder, or download the model first"
        )
    except Exception as error:  # the HTTP library's own errors differ between versions of huggingface_hub
        found = f"could not be downloaded ({type(error).__name__}: {error}); try again"
    else:
        return Path(folder)
    raise MergeError(f"{label} {found}.", code="model_unavailable")
