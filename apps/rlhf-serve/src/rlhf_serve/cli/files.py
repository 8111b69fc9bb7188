"""Shared by commands over a file of prompts: its rows, the engine, how completions are drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlhf_data import Encoder, PromptRecord, UserError, read_rows, record_rows
from rlhf_infer import SamplingParams, VLLMSettings
from rlhf_serve.backends.transformers import load_engine, wants_vllm
from rlhf_serve.cli.load import Parts
from rlhf_serve.service.tokenization import give_template
from rlhf_serve.settings import FileSettings, RowsSettings


def prompt_rows(settings: RowsSettings) -> list[dict[str, Any]]:
    """The rows of the input, each with a prompt: its own, or the text before its completions."""
    rows = list(read_rows(settings.input_path))
    found = []
    for (_, row), records in zip(rows, record_rows(rows, settings.input_path, "prompt"), strict=True):
        if isinstance(records, UserError):
            raise records
        [record] = records
        assert isinstance(record, PromptRecord)
        found.append(row | {"prompt": record.prompt})
    return found


def open_engine(
    settings: FileSettings, parts: Parts, rows: Sequence[dict[str, Any]], done: int
) -> tuple[Any, Callable[[], None]]:
    """The engine, whose tokenizer has the chat template, and the function that closes it.

    The rows after `done` are first checked for prompts vLLM would refuse, as it takes a minute to start.
    """
    if wants_vllm(settings):
        from rlhf_infer import VLLMEngine
        from rlhf_models import load_tokenizer
        from rlhf_serve.backends.vllm import full_model, vllm_settings

        folder, temporary = full_model(parts.model)
        tokenizer, vllm = load_tokenizer(folder), vllm_settings(settings)
        give_template(tokenizer, parts.chat_template)
        _check_for_vllm(settings, vllm, folder, tokenizer, rows, done)
        engine: Any = VLLMEngine(folder, tokenizer, vllm)

        def close() -> None:
            engine.close()
            if temporary is not None:
                temporary.cleanup()
    else:
        engine = load_engine(settings, parts.model)
        close = engine.close
        give_template(engine.tokenizer, parts.chat_template)
    return engine, close


def _check_for_vllm(
    settings: FileSettings,
    vllm: VLLMSettings,
    model: str,
    tokenizer: Any,
    rows: Sequence[dict[str, Any]],
    done: int,
) -> None:
    """Refuse a temperature and prompts that vLLM would refuse."""
    from rlhf_infer.vllm.settings import check_requests
    from rlhf_infer.vllm.starting import known_length

    check_requests((), sampling_params(settings), 0)
    limit, encoder = known_length(model, vllm), Encoder(tokenizer)
    for number, row in enumerate(rows[done:], done + 1):
        length = len(encoder.prompt(row["prompt"]))
        if limit is not None and length + settings.max_tokens > limit:
            raise UserError(
                f"{settings.input_path}, row {number}: the prompt has {length} tokens and max_tokens is "
                f"{settings.max_tokens}, together more than the {limit} of the model's context or "
                "max_model_len; shorten the prompt or lower max_tokens",
                code="context_too_short",
            )


def sampling_params(settings: FileSettings) -> SamplingParams:
    """How completions are drawn."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")
    values = {name: getattr(settings, name) for name in names}
    return SamplingParams(settings.max_tokens, seed=settings.sampling_seed, **values)
