"""A dry run: settings, data and model are checked, tokens and memory are estimated, nothing is trained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from rlhf_algos.engine.optimizer import MOMENT_BYTES, train_in_fp32
from rlhf_algos.engine.parallel import choose_precision
from rlhf_algos.engine.step_examples import examples_at, order_of
from rlhf_algos.jobs.chat_setup import set_chat_format
from rlhf_algos.jobs.config import JobConfig, OnlineJobConfig
from rlhf_algos.jobs.data import Rows, build_sets, demonstrated, load_rows, with_skipped
from rlhf_algos.jobs.methods import METHODS, Method
from rlhf_algos.jobs.models import check_start, job_device, longest_sequence, lora_settings
from rlhf_algos.jobs.online import check_parts
from rlhf_algos.jobs.tiny_models import (
    CHAT_TEMPLATE,
    record_texts,
    tiny_base,
    tiny_positions,
    tiny_tokenizer,
)
from rlhf_algos.process_group import world_size
from rlhf_data import (
    PromptExample,
    StepTokens,
    TokenSequence,
    UserError,
    cache_folder,
    ensure_writable_folder,
    longest_completions,
    micro_batches,
)
from rlhf_models import (
    activation_bytes,
    adapter_base,
    apply_lora,
    build_model,
    build_tokenizer,
    is_language_adapter,
    load_shape,
    memory_text,
    weight_bytes,
)

__all__ = ["plan_training", "shown_tokens"]

_MEASURED_STEPS = 64
"""Steps whose tokens are counted; the rest is taken to be alike."""
_CLASSES: dict[str, Any] = {
    "policy": AutoModelForCausalLM,
    "reward": AutoModelForSequenceClassification,
    "prm": AutoModelForTokenClassification,
}
_SHOWN_CHARACTERS = 600
"""Of each part of the rendered example."""


def plan_training(name: str, config: JobConfig) -> dict[str, Any]:
    """Resolve and check a job without training; what it would do, with how many tokens and how much memory.

    Loads data and tokenizer, never weights.  Tokens are counted on the real prefix trees of the first 64
    steps.  Memory is that of weights, a frozen reference, gradients, moments and
    `rlhf_models.memory.activation_bytes` of the largest pass; on a GPU, CUDA's context and the allocator's
    slack come on top.

    Args:
        name: of the method, a key of `METHODS`.
        config: the job's settings.

    Returns:
        `rows`, pairs of label and text; the last are the first example, what is learned of it after `|=>`.

    Raises:
        UserError: data, model or settings cannot be used.
    """
    method = METHODS[name]
    check_start(method, config)
    if isinstance(config, OnlineJobConfig):
        check_parts(config)
    rows = load_rows(method, config)
    tokenizer, model = _shape(method, config, demonstrated(method, config, rows))
    max_length = longest_sequence(model.config, config.max_length)
    train, held_out = build_sets(method, config, rows, tokenizer, max_length=max_length)
    global_batch_size = _rows_per_step(config)
    per_epoch = math.ceil(len(train) / global_batch_size)
    steps = (
        config.max_steps if config.max_steps > 0 else max(1, math.ceil(config.num_train_epochs * per_epoch))
    )
    tokens = _count_tokens(config, train, global_batch_size, steps)
    rows_text = f"{min(global_batch_size, len(train)):,} rows"
    passes = 1
    if isinstance(config, OnlineJobConfig):
        passes = config.passes
        each = f"{config.num_generations} completion{'s' if config.num_generations > 1 else ''} each"
        rows_text = f"{rows_text}, {each}, {passes} pass{'es' if passes > 1 else ''} over them"
    device = job_device()
    dtype = train_in_fp32(model)
    precision, reason = choose_precision(config, device, dtype)
    limit = "no limit" if max_length is None else f"limit {max_length:,}"
    return {
        "rows": [
            ("method", f"{name}, trained by {'TRL' if config.backend == 'trl' else 'this engine'}"),
            ("model", _model_text(config, model)),
            ("data", _data_text(with_skipped(rows, train, held_out), train, held_out)),
            ("steps", f"{steps:,} of {rows_text} ({steps / per_epoch:.3g} epochs)"),
            ("tokens per step", str(tokens)),
            ("tokens in all", f"{tokens.packed * steps * passes:,}"),
            ("longest sequence", f"{tokens.longest:,} tokens, {limit}"),
            (
                "precision",
                f"{str(dtype).removeprefix('torch.') if precision == 'no' else precision}: {reason}",
            ),
            (f"memory on {device}", _memory_text(config, model, tokens.largest, precision)),
            *_example_rows(config, next(iter(train)), tokenizer),
        ]
    }


def _shape(method: Method, config: JobConfig, records: Sequence[Any]) -> tuple[Any, Any]:
    """The tokenizer, and the model to train without its weights."""
    name = config.model_name_or_path
    if name:
        shape, tokenizer = load_shape(name, adapted=is_language_adapter(name))
    elif config.scratch:
        texts = (text for record in records for text in record_texts(record))
        tokenizer = build_tokenizer(config.scratch, texts)
        tokenizer.chat_template = tokenizer.chat_template or CHAT_TEMPLATE
        with torch.device("meta"):
            shape = build_model(config.scratch, tokenizer=tokenizer).config
    else:
        ensure_writable_folder(cache_folder("offline"))
        tokenizer = tiny_tokenizer(records)
        with torch.device("meta"):
            positions = tiny_positions(config.max_length)
            shape = tiny_base(tokenizer, seed=0, max_positions=positions).config
    if method.model != "policy":
        shape.num_labels = 1
    dtype = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
    with torch.device("meta"):
        model = _CLASSES[method.model].from_config(shape, dtype=dtype)
        if config.use_peft:
            model = apply_lora(model, lora_settings(config))
    set_chat_format(model, tokenizer, config)
    return tokenizer, model


def _count_tokens(
    config: JobConfig, examples: Sequence[Any], global_batch_size: int, steps: int
) -> StepTokens:
    """Tokens of a step, the mean of the first."""
    order = order_of(examples, 0, shuffle=config.shuffle, seed=config.seed)
    counted: list[StepTokens] = []
    measured = min(steps, math.ceil(len(order) / global_batch_size), _MEASURED_STEPS)
    for start in range(0, measured * global_batch_size, global_batch_size):
        step = examples_at(examples, order[start : start + global_batch_size])
        rows = [list(_sequences(_completed(each, config))) for each in step]
        batches = (batch for batch, _ in micro_batches(rows, rows, config.max_tokens_per_batch))
        counted.append(StepTokens.of(batches, [sequence for row in rows for sequence in row]))
    return StepTokens.mean(counted)


def _completed(example: Any, config: JobConfig) -> Any:
    """An example; of a prompt its completions as long as they may get, no two alike."""
    if not isinstance(config, OnlineJobConfig):
        return example
    return longest_completions(example.prompt_ids, config.num_generations, config.max_completion_length)


def _rows_per_step(config: JobConfig) -> int:
    """Rows of a step, over all processes.

    Raises:
        UserError: the completions of an optimizer step are not whole groups.
    """
    if isinstance(config, OnlineJobConfig):
        try:
            return config.prompts_per_step(world_size())
        except ValueError as error:
            raise UserError(str(error)) from error
    return config.per_device_train_batch_size * config.gradient_accumulation_steps * world_size()


def _sequences(example: Any) -> Iterator[TokenSequence]:
    """The token sequences of an example of any kind."""
    if isinstance(example, TokenSequence):
        yield example
    elif isinstance(example, tuple):
        for part in example:
            yield from _sequences(part)


def _example_rows(config: JobConfig, example: Any, tokenizer: Any) -> list[tuple[str, str]]:
    """Learning rate, rewards, and the first example as the model reads it, with special tokens."""
    rows = [("learning rate", f"{config.learning_rate:g}, {config.lr_scheduler_type}")]
    if isinstance(example, PromptExample) and isinstance(config, OnlineJobConfig):
        rewards = ("rewards", ", ".join(config.reward) or "the reward model of the stage before")
        return [*rows, rewards, ("first prompt", shown_tokens(tokenizer, example.prompt_ids))]
    for number, sequence in enumerate(_sequences(example), start=1):
        learned = set(sequence.scored())
        spans = groupby(range(len(sequence.input_ids)), key=learned.__contains__)
        parts = [
            (is_learned, shown_tokens(tokenizer, [sequence.input_ids[i] for i in span]))
            for is_learned, span in spans
        ]
        marked = "".join(f" |=> {part} <=| " if is_learned else part for is_learned, part in parts)
        rows.append((f"first row, sequence {number}", marked.strip().removesuffix(" <=|")))
    return rows


def shown_tokens(tokenizer: Any, ids: Sequence[int]) -> str:
    """Token ids as one line of text with special tokens, the middle of a long one left out."""
    whole = tokenizer.decode(list(ids), skip_special_tokens=False).replace("\n", "\\n")
    half = _SHOWN_CHARACTERS // 2
    return whole if len(whole) <= _SHOWN_CHARACTERS else f"{whole[:half]} ... {whole[-half:]}"


def _model_text(config: JobConfig, model: Any) -> str:
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    origin = config.model_name_or_path or config.scratch or "tiny, built from the rows"
    if is_language_adapter(origin):
        origin = f"the adapter {origin} merged into {adapter_base(origin)}"
    members = getattr(config, "num_members", 1)
    several = f"{members} members, " if members > 1 else ""
    return f"{several}{model.config.model_type}, {origin}; {total:,} parameters, {trained:,} of them trained"


def _data_text(rows: Rows, train: Sequence[Any], held_out: Sequence[Any]) -> str:
    skipped = f", {rows.skipped:,} bad ones left out" if rows.skipped else ""
    return f"{rows.source}: {len(train):,} rows for training, {len(held_out):,} held out{skipped}"


def _memory_text(config: JobConfig, model: Any, tokens: int, precision: str) -> str:
    use_peft = config.use_peft
    bits = 8 if config.load_in_8bit else 4 if config.load_in_4bit else None
    members = getattr(config, "num_members", 1) if getattr(config, "ensemble", "") == "independent" else 1
    base = model.get_base_model() if use_peft else model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = members * weight_bytes(base, bits=bits)
    reference = weights if config.needs_reference and not use_peft else 0.0
    moments = MOMENT_BYTES[config.optim]
    state = members * sum(p.numel() * (p.element_size() + moments) for p in trained)
    itemsize = 2 if precision in ("bf16", "fp16") else next(model.parameters()).element_size()
    text = model.config.get_text_config()
    activations = members * activation_bytes(
        text, tokens, itemsize, checkpointing=config.gradient_checkpointing, device=job_device()
    )
    parts = {"weights": weights, "reference": reference, "gradients and moments": state}
    parts["activations"] = activations
    if getattr(config, "value_model", None) == "separate":
        parts["value model"] = weight_bytes(base) + (0 if use_peft else state) + activations
    return memory_text(parts)
