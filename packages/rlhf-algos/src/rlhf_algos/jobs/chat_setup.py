"""Chat template and end token of a job's model, where the settings name others than its tokenizer's."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_algos.jobs.config import JobConfig
from rlhf_data import Encoder, UserError
from rlhf_models import load_tokenizer

_LOG = logging.getLogger(__name__)
_JINJA = (".jinja", ".j2")


def set_chat_format(model: Any, tokenizer: Any, config: JobConfig) -> None:
    """Give a tokenizer the chat template and the end token that the settings name; both are then saved.

    The end token also becomes that of the model's configs: generation stops at it, and still at those it
    stopped at before.
    """
    if config.chat_template_path is not None:
        tokenizer.chat_template = _template(config.chat_template_path, tokenizer)
    if config.eos_token is None:
        return
    if config.eos_token not in tokenizer.get_vocab():
        raise UserError(
            f"eos_token {config.eos_token!r} is not in the vocabulary of the model's tokenizer; name one of "
            "its tokens, such as the one that ends turns in the chat template",
            code="unknown_token",
        )
    if tokenizer.pad_token == tokenizer.eos_token:
        tokenizer.pad_token = config.eos_token
    tokenizer.eos_token = config.eos_token
    end = tokenizer.eos_token_id
    if hasattr(model, "config"):  # several models together have none
        model.config.get_text_config().eos_token_id = end
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.eos_token_id = [end, *(each for each in _ends(model) if each != end)]


def warn_of_endless_turns(model: Any, tokenizer: Any, records: Sequence[Any]) -> None:
    """Say so where conversations are learned whose turns end with no token that generation stops at."""
    if not tokenizer.chat_template or not any(_is_conversation(record) for record in records[:100]):
        return
    stops = {tokenizer.eos_token_id, *_ends(model)}
    talk = [{"role": "user", "content": "a"}]
    try:
        [ids], start = Encoder(tokenizer).completions(talk, [[{"role": "assistant", "content": "b"}]])
    except UserError:  # reported for the rows
        return
    if not stops.intersection(ids[start:]):
        _LOG.warning(
            "the chat template ends a turn with %r, but the end token is %s: the trained model would go on "
            "after its turn; set eos_token to the token that ends turns",
            tokenizer.decode(ids[start:]),
            tokenizer.eos_token,
        )


def _is_conversation(record: Any) -> bool:
    return any(isinstance(getattr(record, name, None), list) for name in ("messages", "prompt"))


def _ends(model: Any) -> list[int]:
    """The tokens that a model stops at by its generation config."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return [] if ends is None else list(ends) if isinstance(ends, list | tuple) else [ends]


def _template(path: str, tokenizer: Any) -> str:
    """The template in a file, or from another tokenizer."""
    if path.endswith(_JINJA):
        try:
            return Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"chat_template_path {path} cannot be read: {error}; check the path", code="unreadable_file"
            ) from error
    other = load_tokenizer(path)
    if not other.chat_template:
        raise UserError(
            f"chat_template_path {path} has a tokenizer without a chat template; name one that has, or a "
            f"file that ends in {' or '.join(_JINJA)}"
        )
    template = other.get_chat_template()
    known = tokenizer.get_vocab()
    unknown = [each for each in other.all_special_tokens if each in template and each not in known]
    if unknown:
        _LOG.warning(
            "the chat template of %s has %s, which are not tokens of this model and are read as text",
            path,
            ", ".join(unknown),
        )
    return template
