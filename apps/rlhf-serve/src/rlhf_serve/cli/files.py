"""What commands over a file of prompts share: its rows, the engine, how completions are drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf_data import PromptRecord, UserError, read_rows, record_rows
from rlhf_infer import SamplingParams
from rlhf_serve.backends.transformers import load_engine, wants_vllm
from rlhf_serve.cli.load import Parts
from rlhf_serve.service.tokenization import give_template
from rlhf_serve.settings import FileSettings, RowsSettings


def prompt_rows(settings: RowsSettings) -> list[dict[str, Any]]:
    """The rows of the input, each with a prompt: its own, or what comes before its completions."""
    rows = list(read_rows(settings.input_path))
    found = []
    for (_, row), records in zip(rows, record_rows(rows, settings.input_path, "prompt"), strict=True):
        if isinstance(records, UserError):
            raise records
        [record] = records
        assert isinstance(record, PromptRecord)
        found.append(row | {"prompt": record.prompt})
    return found


def open_engine(settings: FileSettings, parts: Parts) -> tuple[Any, Callable[[], None]]:
    """The engine, whose tokenizer has the chat template, and the function that closes it."""
    if wants_vllm(settings):
        from rlhf_infer import VLLMEngine
        from rlhf_models import load_tokenizer
        from rlhf_serve.backends.vllm import full_model, vllm_settings

        folder, temporary = full_model(parts.model)
        engine: Any = VLLMEngine(folder, load_tokenizer(folder), vllm_settings(settings))

        def close() -> None:
            engine.close()
            if temporary is not None:
                temporary.cleanup()
    else:
        engine = load_engine(settings, parts.model)
        close = engine.close
    give_template(engine.tokenizer, parts.chat_template)
    return engine, close


def sampling_params(settings: FileSettings) -> SamplingParams:
    """How completions are drawn."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")
    values = {name: getattr(settings, name) for name in names}
    return SamplingParams(settings.max_tokens, seed=settings.sampling_seed, **values)
