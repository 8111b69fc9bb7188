"""The data of a job: rows from a file or from the story world, held-out rows, tokenised sets of both."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from rlhf_algos.configs.offline import KTOConfig
from rlhf_algos.configs.online import OnlineConfig
from rlhf_algos.jobs.answer_check import AnswerCheck
from rlhf_algos.jobs.config import JobConfig, OnlineJobConfig
from rlhf_algos.process_group import world_size
from rlhf_data import (
    Record,
    StreamingDataset,
    TokenizedDataset,
    UserError,
    arithmetic_records,
    as_messages,
    load_records,
    record_kind,
    settle_ties,
    story_records,
    stratified_split,
    training_stories,
)

if TYPE_CHECKING:
    from rlhf_algos.jobs.methods import Method

__all__ = [
    "Rows",
    "build_sets",
    "conversion",
    "demonstrated",
    "load_rows",
    "prompt_key",
    "split_by_prompt",
    "with_skipped",
]

_LOG = logging.getLogger(__name__)
_SAMPLE_ROWS = 2000
"""Rows of a streamed file that are read to build a tiny model for it."""
_SHOWN_BAD_ROWS = 3


@dataclass(frozen=True)
class Rows:
    """The records of a job.

    Args:
        train: training records; of a streamed file its first ones.
        held_out: held-out records, may be none.
        source: where they come from, in words.
        skipped: bad rows left out; see `with_skipped`.
        streamed: the file that the training set is read from as it is needed, if it is.
    """

    train: Sequence[Any]
    held_out: Sequence[Any]
    source: str
    skipped: int = 0
    streamed: str | None = None


def load_rows(method: Method, config: JobConfig) -> Rows:
    """Read a job's rows, or make them from the story world.

    Args:
        method: whose rows.
        config: the job's settings.

    Raises:
        UserError: a file cannot be read, a row is bad, no row is left to train on, or a row's right answer
            cannot be read by a reward.
    """
    if config.train_data is None:
        train = _embedded(method, config, config.story_rows, "train")
        held_out = _embedded(method, config, config.story_eval_rows, "eval")
        if config.subset_size:
            train = train[: config.subset_size]
        return Rows(train, held_out, "small sums" if _is_arithmetic(config) else "the story world")
    check = AnswerCheck(config) if isinstance(config, OnlineJobConfig) else None
    size = min(config.subset_size or _SAMPLE_ROWS, _SAMPLE_ROWS) if config.streaming else config.subset_size
    train, skipped = _read(config.train_data, method, config, size, check)
    if config.eval_data is not None:
        held_out, more = _read(config.eval_data, method, config, None, check)
        _warn_of_shared_prompts(train, held_out, config)
    elif config.streaming:
        held_out, more = [], 0
        _LOG.info("no row is held out: a streamed file is not split; give held-out rows with --eval-data")
    else:
        split = stratified_split if config.split == "stratified" else split_by_prompt
        train, held_out = split(train, config.eval_fraction)
        more = 0
        if not train:
            raise UserError(
                f"{config.train_data}: all its prompts are held out, none is left to train on; "
                "give more rows, or set eval_fraction to 0"
            )
        if not held_out:
            _LOG.info(
                "no row is held out, so nothing will say whether training helped; give --eval-data FILE"
            )
    streamed = config.train_data if config.streaming else None
    return Rows(train, held_out, str(config.train_data), skipped + more, streamed)


def split_by_prompt(records: Sequence[Any], fraction: float) -> tuple[list[Any], list[Any]]:
    """Split records into training and held-out ones so that no prompt is on both sides.

    A hash of the prompt decides, so a record is on the same side whatever the order and number of the others.

    Args:
        records: any records.
        fraction: share of prompts held out.
    """
    sides: tuple[list[Any], list[Any]] = ([], [])
    for record in records:
        digest = hashlib.sha256(prompt_key(record).encode()).digest()
        sides[int.from_bytes(digest[:8], "big") < fraction * 2**64].append(record)
    return sides


def prompt_key(record: Any) -> str:
    """What a record shares with others of the same prompt, as JSON; without a prompt, the whole of it."""
    for name in ("prompt", "messages", "text"):
        if hasattr(record, name):
            return json.dumps(getattr(record, name), sort_keys=True)
    raise TypeError(f"{type(record).__name__} has neither prompt nor messages nor text")


def build_sets(
    method: Method, config: JobConfig, rows: Rows, tokenizer: Any, *, max_length: int | None
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Tokenise training and held-out rows.

    Args:
        method: whose examples are made.
        config: the job's settings.
        rows: what `load_rows` gave.
        tokenizer: the model's.
        max_length: tokens of a sequence at most.

    Raises:
        UserError: a row cannot be encoded, or none is left to train on.
    """
    options = _set_options(method, config, max_length) | {
        "kind": method.records,
        "convert": conversion(config, rows, tokenizer),
        "on_bad_row": config.on_bad_row,
    }
    if rows.streamed:
        read = {"columns": config.columns, "subset_size": config.subset_size}
        train = StreamingDataset(rows.streamed, tokenizer, **options, **read)
    else:
        train = TokenizedDataset(rows.train, tokenizer, **options)
    held_out: Any = []
    if rows.held_out:
        try:
            held_out = TokenizedDataset(rows.held_out, tokenizer, **options)
        except UserError as error:
            raise UserError(f"held-out rows: {error}", code=error.code, **error.fields) from error
    for name, examples in (("training", train), ("held-out", held_out)):
        _warn_of_bad_rows(f"bad {name} rows", getattr(examples, "skipped", ()))
        if getattr(examples, "dropped", 0):
            _LOG.warning(
                "left out: %d %s rows that do not fit max_length %s; the first: %s",
                examples.dropped,
                name,
                max_length,
                examples.drop_messages[0],
            )
    return train, held_out


def _is_chat(record: Any) -> bool:
    """Whether a record's texts are messages."""
    return any(isinstance(getattr(record, name, None), list | tuple) for name in ("messages", "prompt"))


def conversion(config: JobConfig, rows: Rows, tokenizer: Any) -> Callable[[Record], Record] | None:
    """What turns transcripts and instructions into chat messages, where the job's settings want that.

    Args:
        config: the job's settings.
        rows: what `load_rows` gave.
        tokenizer: the model's.

    Returns:
        `as_messages`; None where nothing is to be turned.

    Raises:
        UserError: messages are wanted, and the tokenizer has no chat template.
    """
    if config.train_data is None or config.transcripts == "text":
        return None
    shown = rows.train[:_SAMPLE_ROWS]
    found = sum(as_messages(record) is not record for record in shown)
    if not found:
        if tokenizer.chat_template and not any(_is_chat(record) for record in shown):
            _LOG.info(
                "the rows are plain texts: the model's chat template is not used; for it, give messages"
            )
        return None
    if not tokenizer.chat_template:
        if config.transcripts == "messages":
            raise UserError(
                "transcripts is messages, but the tokenizer has no chat template; set transcripts to text, "
                "or give a model with a template",
                code="no_chat_template",
            )
        _LOG.info("transcripts and instructions stay texts: the tokenizer has no chat template")
        return None
    _LOG.info(
        "transcripts and instructions become chat messages, which the chat template renders (%d of the first "
        "%d rows); to learn them as texts, set transcripts to text",
        found,
        len(shown),
    )
    return as_messages


def with_skipped(rows: Rows, *sets: Any) -> Rows:
    """The rows with their count of bad ones raised by those that could not be encoded for these sets."""
    return replace(rows, skipped=rows.skipped + sum(len(getattr(each, "skipped", ())) for each in sets))


def demonstrated(method: Method, config: JobConfig, rows: Rows) -> Sequence[Any]:
    """The records that a tiny model is made from: of an embedded task of prompts, right and wrong answers."""
    if not method.online or config.train_data is not None:
        return rows.train
    if _is_arithmetic(config):
        return arithmetic_records("preference", config.story_rows, split="train", seed=config.seed)
    return story_records("preference", config.story_rows, split="train", seed=config.seed)


def _embedded(method: Method, config: JobConfig, count: int, split: Literal["train", "eval"]) -> list[Any]:
    """Rows of the embedded task."""
    make = arithmetic_records if _is_arithmetic(config) else training_stories
    return make(method.records, count, split=split, seed=config.seed)


def _is_arithmetic(config: JobConfig) -> bool:
    return isinstance(config, OnlineJobConfig) and config.task == "arithmetic"


def _set_options(method: Method, config: JobConfig, max_length: int | None) -> dict[str, Any]:
    """What the set of the method's kind of records takes: of the method, or else of the job's settings.

    Raises:
        UserError: a completion leaves no room for a prompt; steps of a single row, from which KTO's KL
            cannot be estimated.
    """
    own: Mapping[str, Callable[[], Any]] = {
        "max_length": lambda: max_length,
        "max_prompt_length": lambda: _prompt_room(cast(OnlineConfig, config), max_length),
        "overlong": lambda: method.overlong,
        "truncation": lambda: None if config.truncation == "auto" else config.truncation,
        "kl_batch_size": lambda: _kl_batch_size(cast(KTOConfig, config)),
    }
    names = [option.name for option in record_kind(method.records).options]
    if config.truncation != "auto" and "truncation" not in names:
        raise UserError(
            f"truncation is {config.truncation}, and rows of the kind {method.records} are not shortened; "
            "leave it out",
            code="invalid_value",
            key="truncation",
        )
    return {name: own[name]() if name in own else getattr(config, name) for name in names}


def _prompt_room(config: OnlineConfig, max_length: int | None) -> int | None:
    room = max_length and max_length - config.max_completion_length
    if room is not None and room < 1:
        raise UserError(
            f"max_completion_length {config.max_completion_length} leaves no room for a prompt in the "
            f"model's context of {max_length}; lower it"
        )
    return room


def _kl_batch_size(config: KTOConfig) -> int | None:
    step = config.per_device_train_batch_size * config.gradient_accumulation_steps * world_size()
    if config.kl_estimate != "mismatched":
        return None
    if step < 2:
        raise UserError(
            "an optimizer step takes 1 row (per_device_train_batch_size x gradient_accumulation_steps x "
            "processes), whose KL could only come from its own completion; take 2 or more, or set "
            "kl_estimate to ema",
            code="too_few_rows",
        )
    return step


def _read(
    path: str, method: Method, config: JobConfig, subset_size: int | None, check: AnswerCheck | None
) -> tuple[list[Any], int]:
    """Records of a file and the bad rows left out; a streamed file's are reported when its set is built."""
    streamed = config.streaming and path == config.train_data
    unread = check.file(path, subset_size=config.subset_size if streamed else subset_size) if check else []
    if unread and streamed:
        raise UserError(
            f"{unread[0]}; a streamed file cannot be read without such rows", code="unreadable_rows"
        )
    options = {"columns": config.columns, "on_bad_row": config.on_bad_row}
    loaded = load_records(path, method.records, subset_size=subset_size, **options)
    records = [record for record in loaded.records if check.accepts(record)] if check else loaded.records
    if unread and not records:
        raise UserError(f"{path}: no row is left; {unread[0]}", code="no_row_left")
    skipped = [*loaded.skipped, *unread]
    records, tied = settle_ties(records, config.ties)
    if tied and not records:
        raise UserError(f"{path}: no row is left; all {len(tied)} are ties", code="no_row_left")
    _warn_of_bad_rows(f"ties of {path}", tied)
    if not streamed:
        _warn_of_bad_rows(f"bad rows of {path}", skipped)
    return records, 0 if streamed else len(skipped)


def _warn_of_bad_rows(what: str, messages: Sequence[str]) -> None:
    if messages:
        shown = "; ".join(messages[:_SHOWN_BAD_ROWS])
        more = len(messages) - _SHOWN_BAD_ROWS
        tail = f"; and {more} more" if more > 0 else ""
        _LOG.warning("left out: %s: %d; %s%s", what, len(messages), shown, tail)


def _warn_of_shared_prompts(train: Sequence[Any], held_out: Sequence[Any], config: JobConfig) -> None:
    known = {prompt_key(record) for record in held_out}
    shared = sum(prompt_key(record) in known for record in train)
    if shared:
        _LOG.warning(
            "%d of %d training rows have a prompt that is also in %s, so its metrics are too good",
            shared,
            len(train),
            config.eval_data,
        )
