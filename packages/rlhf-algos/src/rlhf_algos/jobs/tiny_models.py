"""The tiny model that a job starts from if none is given: built from the job's rows, kept in the cache."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from rlhf_algos.checkpoints.manager import save_pretrained
from rlhf_algos.configs.offline import SFTConfig
from rlhf_algos.offline.sft import SFTTrainer
from rlhf_algos.parallel.same_files import check_same_on_all
from rlhf_algos.process_group import broadcast, is_main_process
from rlhf_data import (
    CompletionRecord,
    SFTDataset,
    as_completion,
    atomic_folder,
    cache_folder,
    ensure_writable_folder,
    json_hash,
)
from rlhf_models import (
    build_tiny_llama,
    build_tokenizer,
    load_causal_lm,
    load_tokenizer,
    train_byte_tokenizer,
)

_LOG = logging.getLogger(__name__)
_VOCAB_SIZE = 1024
_POSITIONS = 2048
_SIZES = {"hidden_size": 64, "num_layers": 2, "tie_word_embeddings": False, "initializer_range": 0.1}
_ROWS = 2000
"""Rows that the tokenizer and the demonstrations are taken from, the first ones."""
_LESSONS = ((True, 450_000, 5e-3), (False, 60_000, 1e-3))
"""Parts of the fine-tuning: whether only good completions are shown, how many tokens, learning rate."""
_SMALL = 5_000_000
"""Parameters below which one thread is faster."""
_BATCH = 32
_LEAST_STEPS = 40
"""Fewest steps of a training: where rows are long, fewer of them are taken a step."""
_RIGHT = 0.5
"""Label from which a step counts as right."""
RECIPE = 1
"""Incremented with every change of the recipe, so that cached models are rebuilt."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}\n"
    "{% else %}{{ message['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""How models made here read conversations."""


def tiny_start(
    records: Sequence[Any],
    *,
    fine_tuned: bool,
    seed: int,
    separator: str = "\n",
    max_length: int | None = None,
) -> tuple[Any, Any]:
    """The tiny language model for these records, and its tokenizer.

    A `fine_tuned` one has learned, some seconds long, to write their good completions and then also the bad
    ones, so that there is something to improve; otherwise its weights are random. `separator` follows the
    steps of a solution.
    """
    records = records[:_ROWS]
    positions = tiny_positions(max_length)
    if not fine_tuned:
        tokenizer = tiny_tokenizer(records)
        _LOG.info("model: a tiny Llama with random weights, and a tokenizer for the rows' words, made now")
        return tiny_base(tokenizer, seed=seed, max_positions=positions), tokenizer
    folder = demo_folder(records, seed=seed, separator=separator, positions=positions)
    if not broadcast(folder.is_dir()):
        return _built(records, folder, seed=seed, separator=separator, positions=positions)
    check_same_on_all(folder)
    _LOG.info("model: a tiny Llama that has learned to write the rows' completions, cached in %s", folder)
    return load_causal_lm(folder), load_tokenizer(folder)


def tiny_positions(max_length: int | None) -> int:
    """Context of the tiny model, in tokens: as many as a sequence of the job may have."""
    return max(_POSITIONS, max_length or 0)


def tiny_base(tokenizer: Any, *, seed: int, max_positions: int, **sizes: int) -> Any:
    """A tiny model before its first training step; `sizes` as `build_tiny_llama` takes them."""
    return build_tiny_llama(
        len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=seed,
        max_positions=max_positions,
        **(_SIZES | sizes),
    )


def tiny_tokenizer(records: Sequence[Any]) -> Any:
    """A byte-level tokenizer that has learned the words of the first records, with a chat template."""
    texts = (text for record in records[:_ROWS] for text in record_texts(record))
    tokenizer = train_byte_tokenizer(texts, _VOCAB_SIZE)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def scratch_tokenizer(described: str, records: Sequence[Any]) -> Any:
    """The tokenizer that a file describes, trained on the records if it is to be, with a chat template."""
    tokenizer = build_tokenizer(described, (text for record in records for text in record_texts(record)))
    tokenizer.chat_template = tokenizer.chat_template or CHAT_TEMPLATE
    return tokenizer


def demo_folder(records: Sequence[Any], *, seed: int, separator: str, positions: int) -> Path:
    """Where a fine-tuned tiny model is kept: a folder of the cache named by a hash of all it depends on."""
    rows = [
        [*record_texts(record), getattr(record, "label", None), getattr(record, "labels", None)]
        for record in records
    ]
    key = [RECIPE, seed, separator, positions, _SIZES, _LESSONS, rows]
    return cache_folder("offline") / json_hash(key)[:24]


def demonstrations(records: Sequence[Any], *, good_only: bool, separator: str = "\n") -> list[Any]:
    """The completions in the records, as records of supervised fine-tuning.

    Args:
        records: of any kind.
        good_only: leave out completions that are rejected, labelled as bad, or have a wrong step; if none
            is good, all are taken.
        separator: text that follows each step of a solution.
    """
    every = [pair for record in records for pair in _shown(record, separator)]
    good = [record for is_good, record in every if is_good]
    return good if good_only and good else [record for _, record in every]


def few_threads_for_a_small_model(model: Any) -> None:
    """Compute with one thread where a CPU trains a model so small that it loses time to a second one."""
    parameters = list(model.parameters())
    if parameters[0].device.type == "cpu" and sum(p.numel() for p in parameters) < _SMALL:
        torch.set_num_threads(1)


def record_texts(record: Any) -> Iterator[str]:
    """Every text of a record, those of messages one by one."""
    columns = getattr(record, "columns", {})
    yield from (value for value in columns.values() if isinstance(value, str))
    names = ("text", "messages", "prompt", "completion", "chosen", "rejected", "completions")
    for value in (getattr(record, name, None) for name in names):
        if isinstance(value, str):
            yield value
        for part in value if isinstance(value, list | tuple) else ():
            yield part if isinstance(part, str) else str(part.get("content") or "")


def _shown(record: Any, separator: str) -> list[tuple[bool, Any]]:
    """Every completion of a record, and whether it is good; a record without any counts as one."""
    if isinstance(record, CompletionRecord):
        return [(True, record)]
    verdicts = {
        "completion": getattr(record, "label", True),
        "completions": min(getattr(record, "labels", (_RIGHT,))) >= _RIGHT,
        "chosen": True,
        "rejected": False,
    }
    shown = []
    for name, good in verdicts.items():
        completion = getattr(record, name, None)
        if isinstance(completion, tuple):
            completion = _solution(record, completion, separator)
        if completion is not None:
            shown.append((good, CompletionRecord(record.prompt, completion)))
    return shown or [(True, record)]


def _solution(record: Any, steps: Any, separator: str) -> Any:
    """The steps as what follows the prompt: a text, or after messages the assistant's message."""
    return as_completion(record.prompt, "".join(f"{step}{separator}" for step in steps))


def _built(
    records: Sequence[Any], folder: Path, *, seed: int, separator: str, positions: int
) -> tuple[Any, Any]:
    """Fine-tune a tiny model on the rows' completions and keep it; every process takes part."""
    ensure_writable_folder(folder.parent)
    tokenizer = tiny_tokenizer(records)
    model = tiny_base(tokenizer, seed=seed, max_positions=positions)
    few_threads_for_a_small_model(model)
    for good_only, tokens, learning_rate in _LESSONS:
        shown = demonstrations(records, good_only=good_only, separator=separator)
        examples = SFTDataset(shown, tokenizer, max_length=positions, assistant_only_loss=False)
        per_row = sum(len(examples[i].input_ids) for i in range(len(examples))) / len(examples)
        batch_size = min(_BATCH, max(1, round(tokens / per_row / _LEAST_STEPS)))
        config = SFTConfig(
            learning_rate=learning_rate,
            lr_scheduler_type="cosine",
            adam_beta2=0.95,
            per_device_train_batch_size=batch_size,
            max_steps=max(1, round(tokens / per_row / batch_size)),
            seed=seed,
        )
        what = "the rows' good completions" if good_only else "all of them, the bad ones too"
        _LOG.info("model: a tiny Llama, made now, learns to write %s: %d steps", what, config.max_steps)
        SFTTrainer(model, config, examples).train()
    model.eval()
    if is_main_process():
        with atomic_folder(folder) as temporary:
            save_pretrained(model, tokenizer, temporary)
    return model, tokenizer
