"""The transformers backend, and loading of the backend that the settings ask for."""

from __future__ import annotations

import asyncio
import importlib.util
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from rlhf_data import UserError
from rlhf_infer import (
    Constraint,
    ContinuousBatcher,
    DraftModel,
    NgramDrafter,
    OnToken,
    PromptLogps,
    Rollout,
    SpeculativeDecoder,
    TransformersEngine,
    first_layers,
)
from rlhf_infer.engines.prefill import parts_within
from rlhf_models import (
    PolicyModel,
    check_tokenizer_fits,
    generation_length,
    is_adapter,
    load_causal_lm,
    load_tokenizer,
)
from rlhf_serve.backends.protocol import Backend, Draw
from rlhf_serve.settings import ModelSettings, ServeSettings, load_options

_PART_TOKENS = 2048
"""Prompt tokens whose log-probs are computed between two tokens of the generation."""


class TransformersBackend:
    """A transformers model; requests join and leave the batch at any token.

    Computes with `threads` CPU threads; None leaves the number to torch. Beside others it computes prompts in
    chunks of `chunk_tokens`; None is 256 on CPUs, 2048 on GPUs.
    """

    name = "transformers"
    dead = False
    """Always false: it runs in this process."""

    def __init__(
        self, engine: TransformersEngine, *, threads: int | None = None, chunk_tokens: int | None = None
    ) -> None:
        self._on_cpu = engine.model.device.type == "cpu"
        self.tokenizer = engine.tokenizer
        limit = generation_length(engine.model)
        self.max_model_len = limit if limit is not None else 1 << 20
        self.max_batch_tokens = engine.max_batch_tokens
        self.vocab_size = engine.vocab_size
        self.eos_token_ids: list[int] = engine.eos_token_ids
        self._engine = engine
        self._handover = _Handover()
        self._batcher = ContinuousBatcher(
            engine,
            chunk_tokens=chunk_tokens or (256 if self._on_cpu else 2048),
            threads=threads,
            after_tokens=self._handover.wake,
        )

    async def generate(self, draw: Draw, on_token: OnToken | None = None) -> list[Rollout]:
        """See `Backend.generate`; samples are always reproducible, and have log-probs."""
        hand_over = None if on_token is None else self._handover.follow(on_token)
        # Cancelling the future that is awaited cancels the batcher's, which is checked before every token.
        return await asyncio.wrap_future(
            self._batcher.submit(draw.prompt, draw.n, draw.params, first=draw.first, on_token=hand_over)
        )

    async def prompt_logps(self, prompts: Sequence[Sequence[int]], top: int) -> list[PromptLogps]:
        """See `Backend.prompt_logps`; a few prompts between two tokens of what is being generated."""
        found: list[PromptLogps] = []
        for part in parts_within(list(map(len, prompts)), _PART_TOKENS):
            work = partial(self._engine.prompt_logps, [prompts[i] for i in part], top)
            found += await asyncio.wrap_future(self._batcher.submit_work(work))
        return found

    def check_constraint(self, constraint: Constraint) -> None:
        """See `Backend.check_constraint`."""
        self._engine.compile(constraint)

    def run_work(self, work: Callable[[], Any]) -> Any:
        """See `Backend.run_work`: on a CPU between two tokens, on a GPU at once."""
        return self._batcher.submit_work(work).result() if self._on_cpu else work()

    def memory(self) -> dict[str, float]:
        """See `Backend.memory`."""
        batcher = self._batcher
        return {
            "kv_tokens": batcher.held_tokens,
            "kv_tokens_limit": self.max_batch_tokens,
            "paused_cohorts": batcher.paused,
            "preemptions": batcher.preemptions,
        } | _guesses(self._engine)

    async def close(self) -> None:
        """See `Backend.close`."""
        await asyncio.to_thread(self._batcher.close)


def _guesses(engine: TransformersEngine) -> dict[str, float]:
    """Counts of a draft's guesses so far; empty without a draft."""
    if not isinstance(engine, SpeculativeDecoder):
        return {}
    return {"guesses": engine.tally.guesses, "right_guesses": engine.tally.right}


class _Handover:
    """Hands tokens over from the thread that generates to an event loop, which is woken once for many."""

    def __init__(self) -> None:
        self._tokens: deque[tuple[OnToken, tuple[Any, ...]]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    def follow(self, function: OnToken) -> OnToken:
        """A stand-in that the other thread calls; the function itself runs in this event loop's thread."""
        self._loop = asyncio.get_running_loop()
        return lambda *arguments: self._tokens.append((function, arguments))

    def wake(self) -> None:
        """Have the event loop call what is there."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._tokens:
            function, arguments = self._tokens.popleft()
            function(*arguments)


def load_backend(settings: ServeSettings, model: str, *, threads: int | None = None) -> Backend:
    """The backend that the settings ask for, with its model loaded.

    transformers computes with `threads` CPU threads; None leaves the number to torch.
    """
    if wants_vllm(settings):
        from rlhf_serve.backends.vllm import VLLMBackend

        return VLLMBackend.start(settings, model)
    engine = load_engine(settings, model)
    return TransformersBackend(engine, threads=threads, chunk_tokens=settings.chunk_tokens)


def load_engine(settings: ModelSettings, model: str) -> TransformersEngine:
    """A transformers engine with its model, or a model under an adapter; one that guesses if asked for."""
    lm, tokenizer = _load(settings, model)
    count = {} if settings.draft_tokens is None else {"guesses": settings.draft_tokens}
    drafter: NgramDrafter | DraftModel | None = NgramDrafter(**count) if settings.draft == "ngram" else None
    if settings.draft_alternatives is not None:
        count["alternatives"] = settings.draft_alternatives
    if settings.draft == "layers":
        layers = settings.draft_layers or max(1, lm.config.get_text_config().num_hidden_layers // 4)
        drafter = DraftModel(first_layers(lm, layers), tokenizer, **count)
    if settings.draft_model is not None:
        drafter = DraftModel(*_load(settings, settings.draft_model), **count)
        drafter.check_tokenizer(tokenizer)
    options = {
        "max_batch_tokens": settings.max_batch_tokens,
        "prefix_cache_tokens": settings.prefix_cache_tokens,
    }
    if drafter is None:
        return TransformersEngine(lm, tokenizer, **options)
    return SpeculativeDecoder(lm, tokenizer, drafter, **options)


def _load(settings: ModelSettings, model: str) -> tuple[Any, Any]:
    """A model, or a model under an adapter, and its tokenizer."""
    options = load_options(settings)
    if is_adapter(model):
        policy = PolicyModel.from_pretrained(model, **options)
        return policy.model, policy.tokenizer
    lm, tokenizer = load_causal_lm(model, **options), load_tokenizer(model)
    check_tokenizer_fits(lm, tokenizer)
    return lm, tokenizer


def wants_vllm(settings: ModelSettings) -> bool:
    """Whether vLLM generates: if requested, or if installed and there is a GPU."""
    if settings.backend != "auto":
        return settings.backend == "vllm"
    return torch.cuda.is_available() and importlib.util.find_spec("vllm") is not None


def check_backend(settings: ModelSettings) -> None:
    """Refuse vLLM if it is missing, before anything is loaded."""
    if settings.backend == "vllm" and importlib.util.find_spec("vllm") is None:
        raise UserError(
            'vLLM is not installed; run `pip install "rlhf-serve[vllm]"`, or use --backend transformers',
            code="missing_package",
        )
