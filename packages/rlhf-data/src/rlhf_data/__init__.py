"""Records, readers, tokenised sets, prefix-tree packing, configs and run folders for alignment."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "worlds.arithmetic": ("arithmetic_records",),
    "records.chats": ("as_messages",),
    "config": ("BaseConfig", "LocalPath", "apply_overrides", "load_config_file"),
    "datasets.tokenized": ("GRPODataset", "KTODataset", "PreferenceDataset", "SFTDataset", "StepDataset"),
    "records.encode": ("Encoder", "TokenSequence"),
    "errors": ("UserError", "exit_cleanly"),
    "records.kto": ("KTOExample", "LabelledRecord"),
    "records.preference": ("PreferencePair", "PreferenceRecord"),
    "records.prompt": ("PromptExample", "PromptRecord"),
    "records.sft": ("CompletionRecord", "ConversationRecord", "TextRecord"),
    "records.steps": ("StepExample", "StepPair", "StepPairRecord", "StepwiseRecord"),
    "runs.atomic": (
        *("atomic_folder", "atomic_write_json", "atomic_write_text", "ensure_writable_folder", "json_hash"),
    ),
    "runs.model_folders": ("model_folder",),
    "datasets.packing": ("PackedBatch", "pack"),
    "readers.files": ("read_rows",),
    "readers.load": ("LoadedRows", "load_records"),
    "readers.qa": ("QADatasetConfig", "QARecord", "load_qa", "qa_from_row", "render_prompt", "split_of"),
    "runs.run_folder": ("RunFolder", "newest_unfinished"),
    "worlds.story_tasks": ("story_records",),
    "worlds.story": ("StoryWorldConfig", "generate_stories"),
    "datasets.streaming": (
        *("StreamingGRPODataset", "StreamingKTODataset", "StreamingPreferenceDataset", "StreamingSFTDataset"),
        *("StreamingStepDataset",),
    ),
    "worlds.sums": ("SumWorldConfig", "generate_sums"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'rlhf_data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rlhf_data.{_MODULE_OF[name]}"), name)
