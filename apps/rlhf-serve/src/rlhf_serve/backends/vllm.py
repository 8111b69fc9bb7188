"""vLLM's asynchronous engine behind a server."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_data import UserError
from rlhf_infer import (
    Constraint,
    Grammars,
    OnToken,
    PromptLogps,
    Rollout,
    SamplingParams,
    VLLMSettings,
    write_weight_folder,
)
from rlhf_infer.async_loop import gather_all
from rlhf_infer.vllm.settings import (
    check_requests,
    end_token_ids,
    engine_request,
    likeliest,
    request_fields,
    require_vllm,
    rollout_from,
    sample_seeds,
    set_environment,
)
from rlhf_infer.vllm.starting import not_started
from rlhf_infer.vllm.worker import platform_arguments
from rlhf_models import PolicyModel, check_files, is_adapter, load_tokenizer
from rlhf_serve.backends.protocol import Draw
from rlhf_serve.settings import ModelSettings


class VLLMBackend:
    """Continuous batching by vLLM's `AsyncLLM`; a temporary folder goes when the backend is closed."""

    name = "vllm"

    def __init__(self, engine: Any, tokenizer: Any, eos_token_ids: Sequence[int], folder: Any = None) -> None:
        self.tokenizer = tokenizer
        self.max_model_len: int = engine.model_config.max_model_len
        self.max_batch_tokens = self.max_model_len
        self.vocab_size: int = engine.model_config.get_vocab_size()
        self.eos_token_ids = list(eos_token_ids)
        self._engine, self._folder = engine, folder
        self._grammars: Grammars | None = None

    @classmethod
    def start(cls, settings: ModelSettings, model: str) -> VLLMBackend:
        """Start the engine in a separate process; adapters are merged into their model first."""
        require_vllm()
        further = vllm_settings(settings).engine_arguments()
        set_environment()
        if settings.tensor_parallel_size == 1:
            # On CPUs vLLM would compute in a further process, and busy-wait on cores which that needs.
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

        model, folder = full_model(model)
        check_files(model)
        tokenizer = load_tokenizer(model)
        arguments: dict[str, Any] = {"worker_extension_cls": "rlhf_infer.vllm.worker.WorkerExtension"}
        # Statistics would observe every token in the event loop's thread, and are never read.
        arguments["disable_log_stats"] = True
        try:
            arguments |= platform_arguments(model, settings.max_model_len) | further
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **arguments))
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            raise not_started(model, error) from error
        return cls(engine, tokenizer, end_token_ids(model, tokenizer), folder)

    @property
    def dead(self) -> bool:
        """See `Backend.dead`: vLLM's process ends after an error in a step, and is not started again."""
        return bool(self._engine.errored)

    async def generate(self, draw: Draw, on_token: OnToken | None = None) -> list[Rollout]:
        """See `Backend.generate`; greedy samples are computed once.

        Reproducible samples are separate requests with separate seeds; others are one request.
        Log-probs are vLLM's own, at temperature 1, in `logps` too.
        """
        params, prompt = draw.params, tuple(draw.prompt)
        check_requests([prompt], replace(params, raw_logprobs=False), self.max_model_len)
        fields = request_fields(params, self.eos_token_ids) | {"detokenize": bool(params.stop)}
        if not draw.logps:
            fields["logprobs"] = None
        requests: list[dict[str, int]] = [{"n": draw.n}]
        if draw.reproducible or params.temperature == 0 or on_token is not None:
            requests = sample_seeds(params, [prompt], draw.n, draw.first)
        drawn = await gather_all(
            self._request(prompt, params, fields | request, draw.first + i, on_token)
            for i, request in enumerate(requests)
        )
        found = [rollout for rollouts in drawn for rollout in rollouts]
        return found * (draw.n // len(found))

    async def _request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        fields: dict[str, Any],
        sample: int,
        on_token: OnToken | None,
    ) -> list[Rollout]:
        """The samples of one request; the engine drops it when this is cancelled."""
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        kind = RequestOutputKind.FINAL_ONLY if on_token is None else RequestOutputKind.CUMULATIVE
        answers = self._engine.generate(
            {"prompt_token_ids": list(prompt)},
            engine_request(fields | {"output_kind": kind}),
            request_id=uuid.uuid4().hex,
        )
        reported, outputs = 0, []
        async for answer in answers:
            outputs = answer.outputs
            if on_token is not None:
                _report(on_token, sample, outputs[0], reported, params.top_logprobs)
                reported = len(outputs[0].token_ids)
        if not outputs:
            raise RuntimeError("vLLM ended a request without an answer")
        rollouts = [
            rollout_from(prompt, each, params.top_logprobs)
            for each in sorted(outputs, key=lambda output: output.index)
        ]
        return [replace(each, raw_logps=each.logps) for each in rollouts] if params.raw_logprobs else rollouts

    async def prompt_logps(self, prompts: Sequence[Sequence[int]], top: int) -> list[PromptLogps]:
        """See `Backend.prompt_logps`."""
        return await gather_all(self._prompt_logps(prompt, top) for prompt in prompts)

    async def _prompt_logps(self, prompt: Sequence[int], top: int) -> PromptLogps:
        fields = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": max(top, 1), "detokenize": False}
        entries: Sequence[Any] = ()
        async for answer in self._engine.generate(
            {"prompt_token_ids": list(prompt)}, engine_request(fields), request_id=uuid.uuid4().hex
        ):
            entries = answer.prompt_logprobs or entries
        pairs = list(zip(prompt[1:], entries[1:], strict=True))
        return PromptLogps(
            [entry[token].logprob for token, entry in pairs],
            [entry[token].rank for token, entry in pairs],
            [likeliest(entry, top) for _, entry in pairs],
        )

    def check_constraint(self, constraint: Constraint) -> None:
        """See `Backend.check_constraint`; vLLM enforces it, with the same library."""
        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer, len(self.tokenizer), self.eos_token_ids)
        self._grammars.compile(constraint)

    def run_work(self, work: Callable[[], Any]) -> Any:
        """See `Backend.run_work`: at once, since vLLM computes in a separate process."""
        return work()

    def memory(self) -> dict[str, float]:
        """See `Backend.memory`: none, since vLLM manages its own."""
        return {}

    async def close(self) -> None:
        """See `Backend.close`."""
        self._engine.shutdown()
        if self._folder is not None:
            self._folder.cleanup()


def _report(on_token: OnToken, sample: int, output: Any, reported: int, top_logprobs: int) -> None:
    """Report a sample's tokens from number `reported` on; without log-probs they are 0."""
    for place in range(reported, len(output.token_ids)):
        token, entry = output.token_ids[place], (output.logprobs[place] if output.logprobs else {})
        logp = entry[token].logprob if entry else 0.0
        on_token(sample, token, logp, likeliest(entry, top_logprobs))


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
        speculative_config=_speculation(settings),
        options=settings.vllm_options,
    )


def _speculation(settings: ModelSettings) -> dict[str, bool | int | float | str] | None:
    """Draft settings under vLLM's names."""
    if settings.draft_alternatives:
        raise UserError(
            "draft_alternatives needs the transformers backend; give --backend transformers, or leave it out",
            code="unsupported_setting",
            key="draft_alternatives",
        )
    if settings.draft_model is not None:
        count = settings.draft_tokens or 4
        return {"method": "draft_model", "model": settings.draft_model, "num_speculative_tokens": count}
    if settings.draft == "layers":
        raise UserError(
            "draft layers needs the transformers backend; give --backend transformers, or leave out draft",
            code="unsupported_setting",
            key="draft",
        )
    if settings.draft is not None:
        # vLLM guesses this many whether earlier guesses were right or not, so fewer than our own engine.
        count = settings.draft_tokens or 4
        return {"method": settings.draft, "num_speculative_tokens": count, "prompt_lookup_max": 3}
    return None
