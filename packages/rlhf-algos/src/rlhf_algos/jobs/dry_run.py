"""A dry run: settings, data and model are checked, tokens and memory are estimated, nothing is trained."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from rlhf_algos.configs.trainer import PolicyConfig
from rlhf_algos.engine.optimizer import MOMENT_BYTES, train_in_fp32
from rlhf_algos.engine.step_examples import examples_at, order_of
from rlhf_algos.jobs.chat_setup import set_chat_format
from rlhf_algos.jobs.config import JobConfig, OnlineJobConfig
from rlhf_algos.jobs.data import Rows, build_sets, demonstrated, load_rows, with_skipped
from rlhf_algos.jobs.methods import METHODS, Method
from rlhf_algos.jobs.models import check_start, job_device, longest_sequence, lora_settings
from rlhf_algos.jobs.online import check_parts, check_value_model
from rlhf_algos.jobs.tiny_models import (
    scratch_tokenizer,
    tiny_base,
    tiny_positions,
    tiny_tokenizer,
)
from rlhf_algos.parallel.memory_plan import (
    Machine,
    check_room,
    memory_by_phase,
    memory_rows,
    packed_in_4bit,
    peak_of,
    trained_shape,
)
from rlhf_algos.parallel.precision import HALF, choose_precision
from rlhf_algos.process_group import world_size
from rlhf_algos.safeguards.capability import check_suites
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
    cache_bytes,
    is_language_adapter,
    load_shape,
    scale_bytes,
    weight_bytes,
)

_MEASURED_STEPS = 64
"""Steps whose tokens are counted; the later ones are assumed to have their mean."""
_CLASSES: dict[str, Any] = {
    "policy": AutoModelForCausalLM,
    "reward": AutoModelForSequenceClassification,
    "judge": AutoModelForSequenceClassification,
    "prm": AutoModelForTokenClassification,
}
_SHOWN_CHARACTERS = 600
"""Of each part of the rendered example."""


def plan_training(name: str, config: JobConfig, machine: Machine | None = None) -> dict[str, Any]:
    """Resolve and check a job without training; what it would do, with how many tokens and how much memory.

    Loads data and tokenizer, never weights.  Tokens are counted on the real prefix trees of the first 64
    steps.  Memory is that of each process, see `rlhf_algos.parallel.memory_plan`, with
    `rlhf_models.memory.activation_bytes` of the largest pass.

    Args:
        name: the method, a key of `METHODS`.
        config: the job's settings.
        machine: what it is planned for; None is this machine with the processes that torchrun started.

    Returns:
        `rows`, pairs of label and text; the last are the first example, what is learned of it after `|=>`.
        `memory`, bytes of each process by phase and part; `steps`; and `work_per_step`, the floating-point
        operations of a step's updates, 6 for each parameter and token (Kaplan et al. 2020, table 1).

    Raises:
        UserError: data, model or settings cannot be used, or the machine cannot hold the job.
    """
    method = METHODS[name]
    machine = machine or Machine(world_size())
    check_start(method, config, machine)
    check_parts(config, elsewhere=machine.card is not None)
    rows = load_rows(method, config)
    tokenizer, model = _shape(method, config, demonstrated(method, config, rows))
    generates = isinstance(config, OnlineJobConfig) and not config.use_vllm
    max_length = longest_sequence(model.config, config.max_length, generates=generates)
    _check_fit(config, model, tokenizer, max_length)
    train, held_out = build_sets(method, config, rows, tokenizer, max_length=max_length)
    global_batch_size = rows_per_step(config, machine.processes)
    per_epoch = math.ceil(len(train) / global_batch_size)
    steps = (
        config.max_steps if config.max_steps > 0 else max(1, math.ceil(config.num_train_epochs * per_epoch))
    )
    step_rows = min(global_batch_size, len(train))
    tokens = _count_tokens(config, train, global_batch_size, steps, machine.processes)
    passes = config.passes if isinstance(config, OnlineJobConfig) else 1
    dtype = train_in_fp32(model)
    precision, reason = _precision(config, machine, dtype)
    memory = _memory(config, model, tokens, precision, machine)
    _check_room(config, model, tokens, precision, machine)
    limit = "no limit" if max_length is None else f"limit {max_length:,}"
    return {
        "memory": memory,
        "steps": steps,
        "work_per_step": 6.0 * sum(map(torch.numel, model.parameters())) * tokens.packed * passes,
        "rows": [
            ("method", f"{name}, trained by {'TRL' if config.backend == 'trl' else 'this engine'}"),
            ("model", _model_text(config, model)),
            ("data", _data_text(with_skipped(rows, train, held_out), train, held_out)),
            ("steps", f"{steps:,} of {_step_text(config, step_rows)} ({steps / per_epoch:.3g} epochs)"),
            ("tokens per step", str(tokens)),
            ("tokens in all", f"{tokens.packed * steps * passes:,}"),
            ("longest sequence", f"{tokens.longest:,} tokens, {limit}"),
            ("precision", f"{_named(dtype, precision)}: {reason}"),
            *memory_rows(memory, machine, str(job_device())),
            *_example_rows(config, next(iter(train)), tokenizer),
        ],
    }


def _check_fit(config: JobConfig, model: Any, tokenizer: Any, max_length: int | None) -> None:
    """Refuse a value model or capability suites that do not go with the policy."""
    check_value_model(config, tokenizer, max_length)
    if isinstance(config, PolicyConfig) and config.capability_steps:
        check_suites(config, model, tokenizer)


def _named(dtype: torch.dtype, precision: str) -> str:
    return str(dtype).removeprefix("torch.") if precision == "no" else precision


def _step_text(config: JobConfig, rows: int) -> str:
    """Describe the size of a step in words."""
    if not isinstance(config, OnlineJobConfig):
        return f"{rows:,} rows"
    each = f"{config.num_generations} completion{'s' if config.num_generations > 1 else ''} each"
    return f"{rows:,} rows, {each}, {config.passes} pass{'es' if config.passes > 1 else ''} over them"


def _shape(method: Method, config: JobConfig, records: Sequence[Any]) -> tuple[Any, Any]:
    """The tokenizer, and the model to train without its weights."""
    name = config.model_name_or_path
    if name:
        shape, tokenizer = load_shape(name, adapted=is_language_adapter(name))
    elif config.scratch:
        tokenizer = scratch_tokenizer(config.scratch, records)
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
    stored = getattr(shape, "dtype", None) or torch.float32
    dtype = stored if config.dtype == "auto" else getattr(torch, config.dtype)
    with torch.device("meta"):
        model = _CLASSES[method.model].from_config(shape, dtype=dtype)
        if config.use_peft:
            model = apply_lora(model, lora_settings(config))
    set_chat_format(model, tokenizer, config)
    return tokenizer, model


def _count_tokens(
    config: JobConfig, examples: Sequence[Any], global_batch_size: int, steps: int, processes: int
) -> StepTokens:
    """Tokens of a step, the mean of the first; the passes are those of each process."""
    order = order_of(examples, 0, shuffle=config.shuffle, seed=config.seed)
    counted: list[StepTokens] = []
    measured = min(steps, math.ceil(len(order) / global_batch_size), _MEASURED_STEPS)
    for start in range(0, measured * global_batch_size, global_batch_size):
        step = examples_at(examples, order[start : start + global_batch_size])
        rows = [list(_sequences(_completed(each, config))) for each in step]
        shares = [rows[first::processes] for first in range(min(processes, len(rows)))]
        batches = (
            batch for own in shares for batch, _ in micro_batches(own, own, config.max_tokens_per_batch)
        )
        counted.append(StepTokens.of(batches, [sequence for row in rows for sequence in row]))
    return StepTokens.mean(counted)


def _completed(example: Any, config: JobConfig) -> Any:
    """An example; for a prompt, distinct completions of the greatest length that sampling allows."""
    if not isinstance(config, OnlineJobConfig):
        return example
    return longest_completions(example.prompt_ids, config.num_generations, config.max_completion_length)


def rows_per_step(config: JobConfig, processes: int) -> int:
    """Rows of a step, over all processes.

    Raises:
        UserError: they make no whole groups.
    """
    if isinstance(config, OnlineJobConfig):
        try:
            return config.prompts_per_step(processes)
        except ValueError as error:
            raise UserError(str(error), code="uneven_groups") from error
    return config.per_device_train_batch_size * config.gradient_accumulation_steps * processes


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
    # An untrusted row must not control the terminal.
    whole = "".join(char if char.isprintable() else "�" for char in whole)
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
    beside = ", and a value model like it" if getattr(config, "value_model", None) == "separate" else ""
    counts = f"{total:,} parameters, {trained:,} of them trained{beside}"
    return f"{several}{model.config.model_type}, {origin}; {counts}"


def _data_text(rows: Rows, train: Sequence[Any], held_out: Sequence[Any]) -> str:
    skipped = f", {rows.skipped:,} bad ones left out" if rows.skipped else ""
    return f"{rows.source}: {len(train):,} rows for training, {len(held_out):,} held out{skipped}"


def _precision(config: JobConfig, machine: Machine, dtype: torch.dtype) -> tuple[str, str]:
    """Precision of the computation on a machine, and why; GPUs that are named have bfloat16."""
    if machine.card is None:
        return choose_precision(config, job_device(), dtype)
    for mode in ("bf16", "fp16"):
        if getattr(config, mode):
            return mode, f"{mode} is set"
    if config.bf16 is False:
        return "no", "bf16 is switched off"
    return "bf16", f"{machine.card} has bfloat16"


def _memory(
    config: JobConfig, model: Any, tokens: StepTokens, precision: str, machine: Machine
) -> dict[str, dict[str, float]]:
    """Bytes of each process by phase and part."""
    bits = 8 if config.load_in_8bit else 4 if config.load_in_4bit else None
    members = getattr(config, "num_members", 1) if getattr(config, "ensemble", "") == "independent" else 1
    base = model.get_base_model() if config.use_peft else model
    weights = members * weight_bytes(base, bits=bits)
    scales = members * scale_bytes(base) if bits == 4 else 0.0
    itemsize = 2 if precision in ("bf16", "fp16") else next(model.parameters()).element_size()
    text = model.config.get_text_config()
    activations = members * activation_bytes(
        text,
        tokens.largest,
        itemsize,
        checkpointing=config.gradient_checkpointing,
        offloading=config.activation_offloading,
        device=job_device(),
        gpu_memory=machine.memory if machine.card else None,
    )
    half = precision in HALF
    shape = trained_shape(
        model,
        frozen=weights - scales if config.use_peft else 0.0,
        reference=weights if config.needs_reference and not config.use_peft else 0.0,
        moments=MOMENT_BYTES[config.optim],
        unsharded=scales,
        packed=packed_in_4bit(base, 2 if half else 4) if bits == 4 else None,
    )
    shape = replace(shape, trained=members * shape.trained)
    if getattr(config, "value_model", None) == "separate":
        activations *= 2
        twice = {name: 2 * getattr(shape, name) for name in ("trained", "frozen", "unsharded")}
        shape = replace(shape, **twice)
    cache = _cache(config, text, tokens, itemsize, machine) if isinstance(config, OnlineJobConfig) else 0.0
    return memory_by_phase(config, shape, machine, half=half, activations=activations, cache=cache)


def _cache(config: OnlineJobConfig, text: Any, tokens: StepTokens, itemsize: int, machine: Machine) -> float:
    """Bytes of keys and values in a process's rollout, or of all that vLLM takes beside the training."""
    if config.use_vllm:
        colocated = config.vllm_mode == "colocate" and machine.card
        return config.vllm_gpu_memory_utilization * machine.memory if colocated else 0.0
    rows = config.prompts_per_step(machine.processes) * config.num_generations
    held = min(math.ceil(rows / machine.processes) * tokens.longest, config.max_kv_tokens)
    return cache_bytes(text, held, itemsize)


_LESS_MEMORY: tuple[dict[str, Any], ...] = (
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": True, "activation_offloading": True},
    {"fsdp": True},
    {"fsdp": True, "gradient_checkpointing": True},
    {"fsdp": True, "gradient_checkpointing": True, "fsdp_cpu_offload": True},
    {"use_peft": True},
    {"use_peft": True, "gradient_checkpointing": True},
    {"use_peft": True, "dtype": "bfloat16"},
    {"use_peft": True, "dtype": "bfloat16", "gradient_checkpointing": True},
    {"use_peft": True, "load_in_4bit": True},
    {"use_peft": True, "load_in_4bit": True, "gradient_checkpointing": True},
    {"fsdp": True, "use_peft": True, "load_in_4bit": True, "gradient_checkpointing": True},
)
"""Changes of settings that save memory, those that change the training least first."""


_SPREAD = {"fsdp": True, "deepspeed": None, "gradient_checkpointing": True}
"""Changes with which more processes need less memory each."""


def _check_room(config: JobConfig, model: Any, tokens: StepTokens, precision: str, machine: Machine) -> None:
    """Refuse a job that the machine's GPUs cannot hold, with the nearest settings that they can."""

    def needs(changes: Mapping[str, Any], machine: Machine) -> float | None:
        if "fsdp" in changes and (machine.processes == 1 or (config.deepspeed and changes != _SPREAD)):
            return None
        try:
            other = type(config).from_dict(config.to_dict() | dict(changes))
        except UserError:
            return None  # it does not go with another setting
        changed = model
        if {"dtype", "use_peft"} & changes.keys():
            changed = copy.deepcopy(model)
        if "dtype" in changes and not config.load_in_4bit:
            changed.to(getattr(torch, other.dtype))
        if other.use_peft != config.use_peft:
            with torch.device("meta"):
                changed = apply_lora(changed, lora_settings(other))
        train_in_fp32(changed)
        return peak_of(_memory(other, changed, tokens, precision, machine))

    check_room(needs, machine, alternatives=_LESS_MEMORY, spread=_SPREAD)
