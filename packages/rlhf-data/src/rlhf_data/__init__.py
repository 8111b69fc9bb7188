"""Records, readers, tokenised sets, prefix-tree packing, configs and run folders for alignment."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "arithmetic": ("arithmetic_records",),
    "chats": ("as_messages",),
    "config": ("BaseConfig", "LocalPath", "apply_overrides", "load_config_file"),
    "datasets": ("GRPODataset", "KTODataset", "PreferenceDataset", "SFTDataset", "StepDataset"),
    "encoding": ("Encoder",),
    "errors": ("UserError", "exit_cleanly"),
    "examples": ("KTOExample", "PreferencePair", "PromptExample", "StepExample", "StepPair"),
    "files": (
        *("atomic_folder", "atomic_write_json", "atomic_write_text", "ensure_writable_folder", "json_hash"),
    ),
    "model_folders": ("model_folder",),
    "packing": ("PackedBatch", "TokenSequence", "pack"),
    "preferences": (
        *("CompletionRecord", "ConversationRecord", "LabelledRecord", "PreferenceRecord", "PromptRecord"),
        *("StepPairRecord", "StepwiseRecord", "TextRecord"),
    ),
    "readers": ("read_rows",),
    "record_files": ("LoadedRows", "load_records"),
    "records": ("QADatasetConfig", "QARecord", "load_qa", "qa_from_row", "render_prompt", "split_of"),
    "run_folder": ("RunFolder", "newest_unfinished"),
    "story_tasks": ("story_records",),
    "story_world": ("StoryWorldConfig", "generate_stories"),
    "streaming": (
        *("StreamingGRPODataset", "StreamingKTODataset", "StreamingPreferenceDataset", "StreamingSFTDataset"),
        *("StreamingStepDataset",),
    ),
    "sum_world": ("SumWorldConfig", "generate_sums"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'rlhf_data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rlhf_data.{_MODULE_OF[name]}"), name)
