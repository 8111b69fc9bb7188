"""The data of a job: rows from a file or from the story world, held-out rows, tokenised sets of both."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from rlhf_algos.configs.offline import KTOConfig
from rlhf_algos.configs.online import OnlineConfig
from rlhf_algos.engine.step_examples import left_out_of
from rlhf_algos.jobs.answer_check import AnswerCheck
from rlhf_algos.jobs.config import JobConfig, OnlineJobConfig
from rlhf_algos.jobs.streamed import held_out_records, open_source, taking
from rlhf_algos.process_group import world_size
from rlhf_data import (
    Record,
    RecordSource,
    StreamingDataset,
    TokenizedDataset,
    UserError,
    arithmetic_records,
    as_messages,
    first_records,
    is_held_out,
    load_records,
    prompt_key,
    record_kind,
    settle_ties,
    story_records,
    stratified_split,
    training_stories,
)

if TYPE_CHECKING:
    from rlhf_algos.jobs.methods import Method

_LOG = logging.getLogger(__name__)
_SAMPLE_ROWS = 2000
"""Rows of a stream that are looked at before it is read: for columns, transcripts, a tiny model."""
_SHOWN_BAD_ROWS = 3


@dataclass(frozen=True)
class Rows:
    """The records of a job.

    Args:
        train: training records; of streamed rows the first ones.
        held_out: held-out records, may be none.
        source: where they come from, for messages.
        skipped: bad rows left out; see `with_skipped`.
        streamed: where training rows are read from as they are needed, if they are.
        take: of streamed rows, what says which of them are trained on.
    """

    train: Sequence[Any]
    held_out: Sequence[Any]
    source: str
    skipped: int = 0
    streamed: RecordSource | None = None
    take: Callable[[Record], bool] | None = None


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
    if config.streaming:
        return _streamed(method, config, check)
    train, skipped = _read(config.train_data, method, config, config.subset_size, check)
    _warn_of_one_label(train, config)
    if config.eval_data is not None:
        held_out, more = _read(config.eval_data, method, config, None, check)
        _warn_of_shared_prompts(train, held_out, config)
    else:
        split = stratified_split if config.split == "stratified" else split_by_prompt
        train, held_out = split(train, config.eval_fraction)
        more = 0
        if not train:
            raise _none_left(config)
        if not held_out:
            _LOG.info(
                "no row is held out, so nothing will say whether training helped; give --eval-data FILE"
            )
    return Rows(train, held_out, str(config.train_data), skipped + more)


def split_by_prompt(records: Sequence[Any], fraction: float) -> tuple[list[Any], list[Any]]:
    """Split records into training and held-out ones so that no prompt is on both sides.

    A hash of the prompt decides, so a record is on the same side whatever the order and number of the others.
    """
    sides: tuple[list[Any], list[Any]] = ([], [])
    for record in records:
        sides[is_held_out(record, fraction)].append(record)
    return sides


def build_sets(
    method: Method, config: JobConfig, rows: Rows, tokenizer: Any, *, max_length: int | None
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Tokenise training and held-out rows."""
    options = _set_options(method, config, max_length) | {
        "kind": method.records,
        "convert": conversion(config, rows, tokenizer),
        "on_bad_row": config.on_bad_row,
    }
    if rows.streamed:
        train: Any = StreamingDataset(rows.streamed, tokenizer, keep=rows.take, **options)
    else:
        train = TokenizedDataset(rows.train, tokenizer, **options)
    held_out: Any = []
    if rows.held_out:
        try:
            held_out = TokenizedDataset(rows.held_out, tokenizer, **options)
        except UserError as error:
            raise UserError(f"held-out rows: {error}", code=error.code, **error.fields) from error
    for name, examples in (("training", train), ("held-out", held_out)):
        if isinstance(examples, TokenizedDataset):
            _warn_of_bad_rows(f"bad {name} rows", examples.skipped)
            _warn_of_dropped(name, examples.dropped, examples.drop_messages, max_length)
    return train, held_out


def tell_left_out(examples: Any) -> dict[str, int]:
    """Say which rows of a streamed training set were left out, and count them; every process must call it.

    Returns:
        `bad_rows` and `dropped_rows` of all processes since the run's start; empty for a set in memory.
    """
    streamed = getattr(examples, "examples", examples)
    if not isinstance(streamed, StreamingDataset):
        return {}
    found = left_out_of(streamed)
    counts = {reason: len(each["numbers"]) for reason, each in found.items()}
    _warn_of_bad_rows("bad training rows that came", found["bad"]["messages"], counts["bad"])
    if "ties" in found:
        _warn_of_bad_rows("ties that came", found["ties"]["messages"], counts["ties"])
    dropped = counts["dropped"]
    _warn_of_dropped("training", dropped, found["dropped"]["messages"], streamed.builder.max_length)
    return {"bad_rows": counts["bad"], "dropped_rows": dropped}


def _streamed(method: Method, config: JobConfig, check: AnswerCheck | None) -> Rows:
    """Rows of a job that stay on disk, and held-out ones in memory."""
    source = open_source(config, method.records)
    first = list(first_records(source, _SAMPLE_ROWS, config.on_bad_row))
    if check:
        check.columns(str(config.train_data), first)
    look = check.record if check else None
    skipped, fraction = 0, config.eval_fraction
    if config.eval_data is not None:
        held_out, skipped = _read(config.eval_data, method, config, None, check)
        _warn_of_shared_prompts(first, held_out, config)
        fraction = 0.0
    else:
        held_out = held_out_records(source, config, look) if fraction else []
        if 0 < len(first) < _SAMPLE_ROWS and all(is_held_out(each, fraction) for each in first):
            raise _none_left(config)
    return Rows(first, held_out, str(config.train_data), skipped, source, taking(fraction, look))


def _none_left(config: JobConfig) -> UserError:
    return UserError(
        f"{config.train_data}: all its prompts are held out, none is left to train on; give more rows, or "
        "set eval_fraction to 0",
        code="no_row_left",
    )


def _is_chat(record: Any) -> bool:
    """Whether a record's texts are messages."""
    return any(isinstance(getattr(record, name, None), list | tuple) for name in ("messages", "prompt"))


def conversion(config: JobConfig, rows: Rows, tokenizer: Any) -> Callable[[Record], Record] | None:
    """The function that turns transcripts and instructions into chat messages, if the settings ask for it.

    Returns:
        `as_messages`; None if nothing is converted.
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
    """Options of the data set for the method's kind of records: the method's own, else the job's."""
    own: Mapping[str, Callable[[], Any]] = {
        "max_length": lambda: max_length,
        "max_prompt_length": lambda: _prompt_room(cast(OnlineConfig, config), max_length),
        "overlong": lambda: method.overlong,
        "truncation": lambda: None if config.truncation == "auto" else config.truncation,
        "kl_batch_size": lambda: _kl_batch_size(config) if isinstance(config, KTOConfig) else None,
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
            f"model's context of {max_length}; lower it",
            code="context_too_short",
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
    """Records of a file, and how many bad rows were left out."""
    unread = check.file(path, subset_size=subset_size) if check else []
    options = {"columns": config.columns, "on_bad_row": config.on_bad_row}
    loaded = load_records(path, method.records, subset_size=subset_size, **options)
    records = [record for record in loaded.records if check.accepts(record)] if check else loaded.records
    if unread and not records:
        raise UserError(f"{path}: no row is left; {unread[0]}", code="no_row_left")
    skipped = [*loaded.skipped, *unread]
    if config.ties != "keep":
        records, tied = settle_ties(records, config.ties)
        if tied and not records:
            raise UserError(f"{path}: no row is left; all {len(tied)} are ties", code="no_row_left")
        _warn_of_bad_rows(f"ties of {path}", tied)
    _warn_of_bad_rows(f"bad rows of {path}", skipped)
    return records, len(skipped)


def _warn_of_bad_rows(what: str, messages: Sequence[str], count: int | None = None) -> None:
    count = len(messages) if count is None else count
    if count:
        shown = "; ".join(messages[:_SHOWN_BAD_ROWS])
        more = count - _SHOWN_BAD_ROWS
        tail = f"; and {more} more" if more > 0 else ""
        _LOG.warning("left out: %s: %d; %s%s", what, count, shown, tail)


def _warn_of_dropped(name: str, count: int, messages: Sequence[str], max_length: int | None) -> None:
    if count:
        first = messages[0] if messages else "met by another process"
        _LOG.warning(
            "left out: %d %s rows that do not fit max_length %s; the first: %s",
            count,
            name,
            max_length,
            first,
        )


def _warn_of_one_label(train: Sequence[Any], config: JobConfig) -> None:
    labels = {getattr(record, "label", None) for record in train} - {None}
    if len(labels) == 1:
        own, other = ("true", "false") if labels.pop() else ("false", "true")
        _LOG.warning(
            "all %d rows of %s are labelled %s, and one label cannot teach a model to tell good from bad; "
            "add rows labelled %s",
            len(train),
            config.train_data,
            own,
            other,
        )


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
