"""vLLM's asynchronous engine behind a server."""

from __future__ import annotations

import asyncio
import os
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_data import UserError
from rlhf_infer import Rollout, SamplingParams
from rlhf_infer.vllm_settings import (
    VLLMSettings,
    check_requests,
    end_token_ids,
    request_fields,
    require_vllm,
    rollout_from,
    sample_seeds,
    stopped_at_least_length,
)
from rlhf_infer.vllm_worker import platform_arguments
from rlhf_infer.weight_folder import write_weight_folder
from rlhf_models import PolicyModel, load_tokenizer
from rlhf_models.adapter_files import is_adapter
from rlhf_serve.backends import OnToken
from rlhf_serve.settings import ModelSettings

_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""No telemetry, the other threads left alone, few messages; what the user has set stays."""


class VLLMBackend:
    """Continuous batching by vLLM; every sample is a request of its own, with a seed of its own.

    Args:
        engine: an `AsyncLLM`.
        tokenizer: of the policy.
        eos_token_ids: what ends a completion.
        folder: a temporary folder that goes when the backend is closed.
    """

    name = "vllm"

    def __init__(self, engine: Any, tokenizer: Any, eos_token_ids: Sequence[int], folder: Any = None) -> None:
        self.tokenizer = tokenizer
        self.max_model_len: int = engine.model_config.max_model_len
        self._engine, self._ends, self._folder = engine, eos_token_ids, folder

    @classmethod
    def start(cls, settings: ModelSettings, model: str) -> VLLMBackend:
        """Start the engine, in a process of its own; adapters are merged into their model first.

        Args:
            settings: what is loaded.
            model: folder or hub name.

        Raises:
            UserError: vLLM is missing or cannot start.
        """
        require_vllm()
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

        model, folder = full_model(model)
        tokenizer = load_tokenizer(model)
        arguments = (
            platform_arguments(model, settings.max_model_len) | vllm_settings(settings).engine_arguments()
        )
        try:
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **arguments))
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(f"vLLM cannot start with {model}: {error}") from error
        return cls(engine, tokenizer, end_token_ids(model, tokenizer), folder)

    async def generate(
        self,
        prompt: Sequence[int],
        n: int,
        params: SamplingParams,
        *,
        first: int = 0,
        on_token: OnToken | None = None,
    ) -> list[Rollout]:
        """See `Backend.generate`; greedy samples are computed once."""
        check_requests([prompt], params, self.max_model_len)
        seeds = sample_seeds(params, [tuple(prompt)], n, first)
        tasks = [
            asyncio.ensure_future(self._sample(prompt, params, seed, first + i, on_token))
            for i, seed in enumerate(seeds)
        ]
        try:
            found = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return list(found) * (n // len(found))

    async def _sample(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: dict[str, int],
        sample: int,
        on_token: OnToken | None,
    ) -> Rollout:
        """One sample; the engine drops it when this is cancelled."""
        from vllm import SamplingParams as Request  # pyright: ignore[reportMissingImports]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        kind = RequestOutputKind.FINAL_ONLY if on_token is None else RequestOutputKind.CUMULATIVE
        fields = request_fields(params, self._ends) | seed
        fields |= {"detokenize": bool(params.stop), "output_kind": kind}
        outputs = self._engine.generate(
            {"prompt_token_ids": list(prompt)}, Request(**fields), request_id=uuid.uuid4().hex
        )
        told, output = 0, None
        async for result in outputs:
            output = result.outputs[0]
            if on_token is not None:
                for place in range(told, len(output.token_ids)):
                    token = output.token_ids[place]
                    on_token(sample, token, output.logprobs[place][token].logprob)
                told = len(output.token_ids)
        if output is None:
            raise RuntimeError("vLLM ended a request without an answer")
        rollout = rollout_from(prompt, output, params.top_logprobs)
        return stopped_at_least_length(rollout, params, self.tokenizer)

    async def close(self) -> None:
        """See `Backend.close`."""
        self._engine.shutdown()
        if self._folder is not None:
            self._folder.cleanup()


def full_model(model: str) -> tuple[str, tempfile.TemporaryDirectory[str] | None]:
    """A folder that vLLM reads: the model's own, or a temporary one with an adapter merged into its base."""
    if not is_adapter(model):
        return model, None
    policy = PolicyModel.from_pretrained(model)
    folder = tempfile.TemporaryDirectory(prefix="rlhf-serve-")
    merged = Path(folder.name) / "model"
    write_weight_folder(policy.model, merged)
    policy.tokenizer.save_pretrained(merged)
    return str(merged), folder


def vllm_settings(settings: ModelSettings) -> VLLMSettings:
    """The settings of the engine."""
    return VLLMSettings(
        dtype=settings.dtype,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        max_model_len=settings.max_model_len,
        tensor_parallel_size=settings.tensor_parallel_size,
        options=settings.vllm_options,
    )
