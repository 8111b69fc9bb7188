"""The files beside the weights: config.json, tokenizer, generation, processor and remote code files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_merge.tokens import AddedToken, append_tokens, read_json

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.tiktoken",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def write_model_files(
    out: Path,
    *,
    config_from: Path,
    tokenizer_from: Path,
    config: dict[str, Any],
    added_tokens: Sequence[AddedToken] | None,
) -> None:
    """Write everything beside the weights; never weights, and no README.

    Args:
        out: an existing folder.
        config_from: folder of the model that lends its config: its processor files and the code of its
            classes are copied.
        tokenizer_from: folder of the model that lends its tokenizer: its tokenizer, chat templates and, as
            they name token ids, generation settings are copied (those of `config_from` where it has none).
        config: the result's config.json; empty where no model has one, and none is written.
        added_tokens: tokens to append to the tokenizer, from `vocab.align`.

    Raises:
        MergeError: tokens are to be appended to a tokenizer without tokenizer.json.
    """
    if config:
        (out / "config.json").write_text(
            json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    _copy(config_from, out, _PROCESSOR_FILES)
    _copy(config_from, out, ("generation_config.json",))
    _copy(tokenizer_from, out, ("generation_config.json",))
    _copy(tokenizer_from, out, _TOKENIZER_FILES)
    # Code of the tokenizer's folder first: where both have a file, the config's is the model's.
    for folder in (tokenizer_from, config_from):
        if any(_has_code(path) for path in (folder / "config.json", folder / "tokenizer_config.json")):
            _copy(folder, out, ("*.py",))
    if added_tokens:
        append_tokens(out, added_tokens)


def _copy(source: Path, out: Path, patterns: Sequence[str]) -> None:
    for pattern in patterns:
        for path in sorted(source.glob(pattern)):
            target = out / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)


def _has_code(path: Path) -> bool:
    return path.is_file() and "auto_map" in read_json(path)
