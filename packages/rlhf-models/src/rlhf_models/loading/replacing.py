"""Writing weights into a folder that holds others, so that none of those is ever loaded in their place."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlhf_data import CHECKSUMS_FILE
from rlhf_models.loading.sources import INDEX_FILE

_WHOLE = re.compile(r"(pytorch_)?model(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER = re.compile(r"adapter_config\.json|adapter_model\.(safetensors|bin)|base_model\.json")


@contextlib.contextmanager
def replacing_weights(folder: str | Path) -> Iterator[Path]:
    """Yield where to write a model or an adapter that is to lie in a folder; parents are made.

    Weights that lie there under other names, whole ones, shards or an adapter's, are removed once the new
    ones are in place: a single file would be loaded before new shards, an adapter before a new model. A kill
    leaves the old or the new ones to be loaded; where shards of both have the same names, or an adapter takes
    the place of a model, it may leave neither, and never a mixture.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    old = [path for path in folder.iterdir() if _is_weights(path.name) or path.name == CHECKSUMS_FILE]
    if not old:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix=".weights-", dir=folder) as name:
        place = Path(name)
        yield place
        new = sorted((path for path in place.rglob("*") if path.is_file()), key=_named_last)
        written = {path.relative_to(place).as_posix() for path in new}
        (folder / CHECKSUMS_FILE).unlink(missing_ok=True)
        if any(path.name in written and "-of-" in path.name for path in old):
            (folder / INDEX_FILE).unlink(missing_ok=True)
        keep = _is_base(folder, place / _ADAPTER_CONFIG)
        if _ADAPTER_CONFIG in written and not keep:
            (folder / "config.json").unlink(missing_ok=True)  # transformers takes its model for the base
        for path in new:
            target = folder / path.relative_to(place)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
        for path in sorted(old, key=_named_last, reverse=True):
            if path.name not in written and not (keep and _WHOLE.fullmatch(path.name)):
                path.unlink(missing_ok=True)


def _is_weights(name: str) -> bool:
    return bool(_WHOLE.fullmatch(name) or _ADAPTER.fullmatch(name))


def _named_last(path: Path) -> tuple[bool, str]:
    """Configs and indexes, which say what is loaded, come after what they name."""
    return path.suffix == ".json", path.name


def _is_base(folder: Path, config: Path) -> bool:
    """Whether a folder holds the model that an adapter was trained on."""
    if not config.is_file():
        return False
    base = json.loads(config.read_text(encoding="utf-8")).get("base_model_name_or_path")
    return bool(base) and os.path.isdir(base) and os.path.samefile(base, folder)
