"""What generates for a server: one interface, transformers or vLLM behind it."""

from __future__ import annotations

import asyncio
import importlib.util
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from rlhf_data import UserError
from rlhf_infer import ContinuousBatcher, OnToken, Rollout, TransformersEngine
from rlhf_models import PolicyModel, context_length, is_adapter, load_causal_lm, load_tokenizer
from rlhf_serve.backends.protocol import Backend, Draw
from rlhf_serve.settings import ModelSettings


class TransformersBackend:
    """A transformers model; requests join and leave the batch at any token.

    Args:
        engine: generates.
        threads: CPU threads that it computes with; None for what torch takes.
    """

    name = "transformers"

    def __init__(self, engine: TransformersEngine, *, threads: int | None = None) -> None:
        self._on_cpu = engine.model.device.type == "cpu"
        self.tokenizer = engine.tokenizer
        limit = context_length(engine.model)
        self.max_model_len = limit if limit is not None else 1 << 20
        self._handover = _Handover()
        self._batcher = ContinuousBatcher(engine, threads=threads, after_tokens=self._handover.wake)

    async def generate(self, draw: Draw, on_token: OnToken | None = None) -> list[Rollout]:
        """See `Backend.generate`; samples are always reproducible, and have log-probs."""
        hand_over = None if on_token is None else self._handover.follow(on_token)
        # Cancelling the future that is awaited cancels the batcher's, which it looks at before every token.
        return await asyncio.wrap_future(
            self._batcher.submit(draw.prompt, draw.n, draw.params, first=draw.first, on_token=hand_over)
        )

    def run_work(self, work: Callable[[], Any]) -> Any:
        """See `Backend.run_work`: on a CPU between two tokens, beside a GPU at once."""
        return self._batcher.run(work) if self._on_cpu else work()

    async def close(self) -> None:
        """See `Backend.close`."""
        await asyncio.to_thread(self._batcher.close)


class _Handover:
    """Hands tokens over from the thread that generates to an event loop, which is woken once for many."""

    def __init__(self) -> None:
        self._tokens: deque[tuple[OnToken, tuple[Any, ...]]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    def follow(self, function: OnToken) -> OnToken:
        """What the other thread calls in place of the function, which this event loop's thread then calls."""
        self._loop = asyncio.get_running_loop()
        return lambda *told: self._tokens.append((function, told))

    def wake(self) -> None:
        """Have the event loop call what is there."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._tokens:
            function, told = self._tokens.popleft()
            function(*told)


def load_backend(settings: ModelSettings, model: str, *, threads: int | None = None) -> Backend:
    """The backend that the settings ask for, with its model loaded.

    Args:
        settings: what is loaded.
        model: folder or hub name.
        threads: CPU threads of transformers; None for what torch takes.

    Raises:
        UserError: the model cannot be loaded, or vLLM is asked for and missing or cannot start.
    """
    if wants_vllm(settings):
        from rlhf_serve.backends.vllm import VLLMBackend

        return VLLMBackend.start(settings, model)
    return TransformersBackend(load_engine(settings, model), threads=threads)


def load_engine(settings: ModelSettings, model: str) -> TransformersEngine:
    """A transformers engine with its model, or a model under an adapter.

    Raises:
        UserError: it cannot be loaded.
    """
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options: dict[str, Any] = {"dtype": settings.dtype, "device": device}
    if is_adapter(model):
        policy = PolicyModel.from_pretrained(model, **options)
        lm, tokenizer = policy.model, policy.tokenizer
    else:
        lm, tokenizer = load_causal_lm(model, **options), load_tokenizer(model)
    return TransformersEngine(lm, tokenizer, max_batch_tokens=settings.max_batch_tokens)


def wants_vllm(settings: ModelSettings) -> bool:
    """Whether vLLM generates: where it is asked for, or installed beside a GPU."""
    if settings.backend != "auto":
        return settings.backend == "vllm"
    return torch.cuda.is_available() and importlib.util.find_spec("vllm") is not None


def check_backend(settings: ModelSettings) -> None:
    """Refuse vLLM where it is missing, before anything is loaded.

    Raises:
        UserError: it is.
    """
    if settings.backend == "vllm" and importlib.util.find_spec("vllm") is None:
        raise UserError(
            'vLLM is not installed; run `pip install "rlhf-serve[vllm]"`, or use --backend transformers',
            code="missing_package",
        )
