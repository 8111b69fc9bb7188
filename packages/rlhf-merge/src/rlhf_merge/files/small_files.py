"""The files beside the weights: config.json, tokenizer, generation, processor and remote code files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_merge.errors import damaged, readable, regular
from rlhf_merge.files.tokens import AddedToken, append_tokens
from rlhf_merge.files.weight_index import inside, read_json

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
    """Write everything beside the weights; never weights, and no README."""
    if config:
        with damaged(config_from / "config.json"):
            content = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
        (out / "config.json").write_bytes(content)
    for name, source in copied_files(config_from, tokenizer_from).items():
        target = out / name
        target.parent.mkdir(exist_ok=True)
        with readable(source):
            content = regular(source).read_bytes()
        target.write_bytes(content)
    if added_tokens:
        with damaged(f"the tokenizer in {tokenizer_from}"):
            append_tokens(out, added_tokens)


def copied_files(config_from: Path, tokenizer_from: Path) -> dict[str, Path]:
    """The files that `write_model_files` copies, by their names in the result."""
    wanted = [
        (config_from, (*_PROCESSOR_FILES, "generation_config.json")),
        (tokenizer_from, ("generation_config.json", *_TOKENIZER_FILES)),
    ]
    # Code of the tokenizer's folder first: where both have a file, the config's is the model's.
    for folder in (tokenizer_from, config_from):
        if any(_has_code(path) for path in (folder / "config.json", folder / "tokenizer_config.json")):
            wanted.append((folder, ("*.py",)))
    return {
        path.relative_to(folder).as_posix(): inside(folder, path)
        for folder, patterns in wanted
        for pattern in patterns
        for path in sorted(folder.glob(pattern))
    }


def _has_code(path: Path) -> bool:
    return regular(path).is_file() and "auto_map" in read_json(path)
