"""The files beside the weights: config.json, the tokenizer and its tokens, generation, processor and code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_merge.errors import MergeError, readable
from rlhf_merge.files.folder import check_none_missing, check_undamaged, inside, is_file, read_json

VOCABULARY_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt"),
    *("tokenizer.model", "spiece.model"),
)
"""Files of which a folder with a tokenizer has one."""
_TOKENIZER_FILES = (
    *(*VOCABULARY_FILES, "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("sentencepiece.bpe.model", "*.tiktoken", "tekken.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")

AddedToken = dict[str, Any]
"""A token as `added_tokens` of tokenizer.json lists it: id, content and the flags below."""

_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
"""The flags of an added token whose file gives only its text; the default of transformers' `AddedToken`."""

_MOST_IDS = 2**31


@dataclass(frozen=True)
class TokenTable:
    """The tokens of a tokenizer, and by their text those that were added to the trained vocabulary."""

    ids: Mapping[str, int]
    added: Mapping[str, AddedToken] = field(default_factory=dict)
    fast: bool = True
    """Whether the folder has a tokenizer.json, to which tokens can be appended."""


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
        with readable(config_from / "config.json"):
            content = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
        (out / "config.json").write_bytes(content)
    for name, source in copied_files(config_from, tokenizer_from).items():
        with readable(source):
            content = source.read_bytes()
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(content)
    if added_tokens:
        with readable(f"the tokenizer in {tokenizer_from}"):
            append_tokens(out, added_tokens)


def copied_files(config_from: Path, tokenizer_from: Path) -> dict[str, Path]:
    """The files that `write_model_files` copies, by their names in the result, if `checksums.json` allows."""
    check_none_missing(tokenizer_from, _TOKENIZER_FILES)
    check_none_missing(config_from, (*_PROCESSOR_FILES, "generation_config.json"))
    for path in (tokenizer_from / name for name in (*VOCABULARY_FILES, "merges.txt")):
        if is_file(path):
            check_undamaged(path)
    wanted = [
        (config_from, (*_PROCESSOR_FILES, "generation_config.json")),
        (tokenizer_from, ("generation_config.json", *_TOKENIZER_FILES)),
    ]
    # Code of the tokenizer's folder first: where both have a file, the config's is the model's.
    for folder in (tokenizer_from, config_from):
        configs = [
            path for name in ("config", "tokenizer_config") if is_file(path := folder / f"{name}.json")
        ]
        if any("auto_map" in read_json(path) for path in configs):
            wanted.append((folder, ("*.py",)))
    return {
        path.relative_to(folder).as_posix(): inside(folder, path)
        for folder, patterns in wanted
        for pattern in patterns
        for path in sorted(folder.glob(pattern))
    }


def read_tokens(folder: Path) -> TokenTable | None:
    """The tokens of the tokenizer in a folder.

    They come from tokenizer.json; else from vocab.json or vocab.txt, with the added tokens that
    tokenizer_config.json and added_tokens.json list. None where the folder has none of the first three: the
    vocabulary of a SentencePiece or tiktoken file alone is not read.
    """
    with readable(f"the tokenizer in {folder}"):
        names = (name for name in ("tokenizer.json", "vocab.json", "vocab.txt") if is_file(folder / name))
        found = next(names, None)
        if found is None:
            return None
        if found == "tokenizer.json":
            content = read_json(folder / found)
            ids = _model_ids(content.get("model"), folder)
            added = {token["content"]: token for token in content.get("added_tokens") or ()}
        elif found == "vocab.json":
            ids, added = _model_ids({"vocab": read_json(folder / found)}, folder), _listed_beside(folder)
        else:
            # Split at line feeds alone: other line separators of Unicode are tokens of some vocabularies.
            lines = (folder / found).read_text(encoding="utf-8").removesuffix("\n").split("\n")
            ids, added = {token: i for i, token in enumerate(lines)}, _listed_beside(folder)
        for text, token in added.items():
            # The tokenizers library gives an added token the id of its text in the vocabulary, if it has one.
            ids.setdefault(text, token["id"])
        for token, i in ids.items():
            if not isinstance(token, str) or type(i) is not int or not 0 <= i < _MOST_IDS:
                raise ValueError(f"token {token!r} has the id {i!r}")
        return TokenTable(ids, added, found == "tokenizer.json")


def _model_ids(model: Any, folder: Path) -> dict[str, int]:
    """The ids of a trained vocabulary: a mapping (BPE, WordPiece) or a list with scores (Unigram)."""
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):
        return {token: i for i, (token, _) in enumerate(vocab)}
    if not isinstance(vocab, dict):
        message = f"the tokenizer in {folder} lists no vocabulary of tokens and ids; save it again"
        raise MergeError(message, code="missing_vocabulary", path=str(folder))
    return dict(vocab)


def _listed_beside(folder: Path) -> dict[str, AddedToken]:
    """The added tokens that added_tokens.json and tokenizer_config.json list; the second knows the flags."""
    tokens: dict[str, AddedToken] = {}
    listed, settings = folder / "added_tokens.json", folder / "tokenizer_config.json"
    if is_file(listed):
        tokens = {text: {**_FLAGS, "content": text, "id": i} for text, i in read_json(listed).items()}
    if is_file(settings):
        decoder = read_json(settings).get("added_tokens_decoder") or {}
        tokens |= {token["content"]: {**_FLAGS, **token, "id": int(i)} for i, token in decoder.items()}
    return tokens


def append_tokens(folder: Path, tokens: Sequence[AddedToken]) -> None:
    """Append tokens to the tokenizer files in a folder, in every file that lists added tokens."""
    path = folder / "tokenizer.json"
    content = read_json(path)
    written = {path: content | {"added_tokens": [*(content.get("added_tokens") or ()), *tokens]}}
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    if "added_tokens_decoder" in settings:
        for token in tokens:
            settings["added_tokens_decoder"][str(token["id"])] = {k: v for k, v in token.items() if k != "id"}
        written[path] = settings
    path = folder / "added_tokens.json"
    if path.is_file():
        written[path] = read_json(path) | {token["content"]: token["id"] for token in tokens}
    for path, content in written.items():
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
