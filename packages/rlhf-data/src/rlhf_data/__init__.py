"""Records, readers, prefix-tree packing, configs and run folders for aligning language models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_data.config import BaseConfig as BaseConfig
    from rlhf_data.config import apply_overrides as apply_overrides
    from rlhf_data.config import load_config_file as load_config_file
    from rlhf_data.errors import UserError as UserError
    from rlhf_data.files import atomic_folder as atomic_folder
    from rlhf_data.files import atomic_write_json as atomic_write_json
    from rlhf_data.files import atomic_write_text as atomic_write_text
    from rlhf_data.files import ensure_writable_folder as ensure_writable_folder
    from rlhf_data.files import json_hash as json_hash
    from rlhf_data.packing import PackedBatch as PackedBatch
    from rlhf_data.packing import TokenSequence as TokenSequence
    from rlhf_data.packing import pack as pack
    from rlhf_data.readers import read_rows as read_rows
    from rlhf_data.records import QADatasetConfig as QADatasetConfig
    from rlhf_data.records import QARecord as QARecord
    from rlhf_data.records import load_qa as load_qa
    from rlhf_data.records import qa_from_row as qa_from_row
    from rlhf_data.records import render_prompt as render_prompt
    from rlhf_data.records import split_of as split_of
    from rlhf_data.run_folder import RunFolder as RunFolder
    from rlhf_data.run_folder import newest_unfinished as newest_unfinished
    from rlhf_data.story_world import StoryWorldConfig as StoryWorldConfig
    from rlhf_data.story_world import generate_stories as generate_stories

_MODULES = {
    "config": ("BaseConfig", "apply_overrides", "load_config_file"),
    "errors": ("UserError",),
    "files": (
        "atomic_folder",
        "atomic_write_json",
        "atomic_write_text",
        "ensure_writable_folder",
        "json_hash",
    ),
    "packing": ("PackedBatch", "TokenSequence", "pack"),
    "readers": ("read_rows",),
    "records": ("QADatasetConfig", "QARecord", "load_qa", "qa_from_row", "render_prompt", "split_of"),
    "run_folder": ("RunFolder", "newest_unfinished"),
    "story_world": ("StoryWorldConfig", "generate_stories"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'rlhf_data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rlhf_data.{_MODULE_OF[name]}"), name)
