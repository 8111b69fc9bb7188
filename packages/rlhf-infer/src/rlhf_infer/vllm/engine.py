"""Generation with vLLM in this process."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_data import UserError
from rlhf_infer.engines.protocol import Rollout, SamplingParams
from rlhf_infer.vllm.settings import (
    VLLMSettings,
    check_lengths,
    check_requests,
    end_token_ids,
    engine_request,
    request_fields,
    require_vllm,
    rollout_from,
    sample_seeds,
    set_environment,
)
from rlhf_infer.vllm.signals_held import SignalsHeld
from rlhf_infer.vllm.stall_watch import StallWatch
from rlhf_infer.vllm.starting import not_started
from rlhf_infer.vllm.weight_export import policy_tensors, write_adapter_folder, write_weight_folder
from rlhf_infer.vllm.worker import platform_arguments
from rlhf_models import check_files


class VLLMEngine:
    """Generates with vLLM in this process, next to the model being trained.

    vLLM computes shared prompts once, schedules samples by itself, and starts its own process group
    if there is none (torch.distributed is initialised afterwards). The random states of Python, NumPy and
    torch stay what they were. For several training processes use a server (`VLLMServerEngine`).

    Args:
        model_folder: folder or hub name of the model, with its tokenizer; `write_weight_folder` makes one.
        tokenizer: for its end-of-sequence token.
        settings: size and shape; None for the defaults. With `max_lora_rank`, `update_weights` hands over
            adapters, and the folder must hold the model that they are trained on.
        timeout_s: longest time without a new token, after which generating ends with an error.

    Raises:
        UserError: vLLM is missing or cannot start, or this is one of several training processes.
    """

    def __init__(
        self,
        model_folder: str | Path,
        tokenizer: Any,
        settings: VLLMSettings | None = None,
        *,
        timeout_s: float = 600.0,
    ) -> None:
        require_vllm()
        self._owns_process_group = not torch.distributed.is_initialized()
        if not self._owns_process_group and torch.distributed.get_world_size() > 1:
            raise UserError(
                "vLLM in process works in one training process, this is one of "
                f"{torch.distributed.get_world_size()}; use vLLM's server mode"
            )
        check_files(model_folder)
        self.tokenizer = tokenizer
        self.settings = settings or VLLMSettings()
        self.eos_token_ids = end_token_ids(str(model_folder), tokenizer)
        self.timeout_s = timeout_s
        self._version = 0
        self._adapter: Any = None
        self._folder = Path(tempfile.mkdtemp(prefix="rlhf-vllm-"))
        try:
            with _random_state_kept():
                self._llm = _start(str(model_folder), self.settings)
        except BaseException:
            shutil.rmtree(self._folder)
            raise
        self.max_model_len: int = self._llm.llm_engine.model_config.max_model_len

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, params: SamplingParams, *, first: int = 0
    ) -> list[list[Rollout]]:
        """Draw `n` completions of each prompt; see `GenerationEngine`.

        Each sample is a separate request, with a seed from (seed, prompt, sample index); equal prompts get
        the same samples, and greedy ones are computed once.

        Raises:
            UserError: a prompt is empty or too long, or `params` holds what vLLM does not do.
        """
        check_requests(prompts, params, self.max_model_len)
        if not prompts:
            return []
        distinct = list(dict.fromkeys(tuple(int(token) for token in prompt) for prompt in prompts))
        seeds = sample_seeds(params, distinct, n, first)
        each = len(seeds) // len(distinct)
        fields = request_fields(params, self.eos_token_ids) | {"detokenize": bool(params.stop)}
        watch = StallWatch(self._progress, self.timeout_s)
        with SignalsHeld() as signals, _random_state_kept(), self._nothing_left_over(), watch:
            self._llm.enqueue(
                [{"prompt_token_ids": list(prompt)} for prompt in distinct for _ in range(each)],
                [engine_request(fields | seed) for seed in seeds],
                use_tqdm=False,
                lora_request=self._adapter,
            )
            outputs = self._finished(signals)
        drawn = {
            prompt: [
                rollout_from(prompt, output.outputs[0], params.top_logprobs)
                for output in outputs[i * each : (i + 1) * each]
            ]
            for i, prompt in enumerate(distinct)
        }
        return [(drawn[tuple(prompt)] * (n // each)) for prompt in prompts]

    def check_lengths(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Refuse prompts that are empty, or do not fit `max_model_len` with a completion.

        Raises:
            UserError: a prompt is one of these.
        """
        check_lengths(prompts, max_new_tokens, self.max_model_len)

    def update_weights(self, model: Any) -> None:
        """Copy the weights of the model being trained, which stays as it is.

        Without `max_lora_rank` all weights go over, a PeftModel's active adapter merged on the way. With it
        the active adapter goes over, under a name and number that are never used again.

        Args:
            model: a transformers causal LM, or a PeftModel around one.

        Raises:
            UserError: the adapter is of a kind that vLLM does not take.
        """
        self._version += 1
        name = f"policy-v{self._version:04d}"
        folder = self._folder / name
        if self.settings.max_lora_rank is not None:
            self._update_adapter(model, name, folder, self.settings.max_lora_rank)
            return
        if self.settings.tensor_parallel_size > 1:
            write_weight_folder(model, folder)
            source: dict[str, Any] = {"weights_path": str(folder)}
        else:
            source = {"weights_iterator": policy_tensors(model)}
        self._llm.collective_rpc("reload_weights", kwargs=source)
        self._llm.collective_rpc("pack_heads")
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache, whose keys and values are of the old weights")
        shutil.rmtree(folder, ignore_errors=True)

    def exact_logps(self, params: SamplingParams) -> bool:
        """Whether rollouts' log-probs are what a trainer computes for the same tokens.

        Always without speculation; vLLM scores guesses that were right at temperature 1.
        """
        return self.settings.speculative_config is None or params.temperature in (0, 1)

    def close(self) -> None:
        """Stop vLLM and free its memory, and end its process group."""
        from vllm.distributed import (  # pyright: ignore[reportMissingImports]
            destroy_distributed_environment,
            destroy_model_parallel,
        )

        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        destroy_model_parallel()
        if self._owns_process_group:
            destroy_distributed_environment()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        shutil.rmtree(self._folder)

    def _update_adapter(self, model: Any, name: str, folder: Path, max_rank: int) -> None:
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        engine = self._llm.llm_engine
        written = write_adapter_folder(model, folder, max_rank=max_rank)
        if self._adapter is not None:
            engine.remove_lora(self._adapter.lora_int_id)
            shutil.rmtree(self._adapter.lora_path)
        self._adapter = LoRARequest(name, self._version, str(folder)) if written else None
        if self._adapter is not None and not engine.add_lora(self._adapter):
            raise RuntimeError(f"vLLM did not take the adapter {name}")

    def _finished(self, signals: SignalsHeld) -> list[Any]:
        """The outputs of all requests in their order; signals are answered after each step."""
        engine, outputs = self._llm.llm_engine, []
        while engine.has_unfinished_requests():
            signals.deliver()
            outputs += [output for output in engine.step() if output.finished]
        return sorted(outputs, key=lambda output: int(output.request_id))

    def _progress(self) -> tuple[int, int]:
        """Unfinished requests, and tokens that they have."""
        states = list(self._llm.llm_engine.output_processor.request_states.values())
        return len(states), sum(state.detokenizer.num_output_tokens() for state in states)

    @contextlib.contextmanager
    def _nothing_left_over(self) -> Iterator[None]:
        """Take back the requests of a call that was broken off, which the next one would answer."""
        try:
            yield
        except BaseException:
            engine = self._llm.llm_engine
            engine.abort_request(list(engine.output_processor.request_states), internal=True)
            raise


def _start(model: str, settings: VLLMSettings) -> Any:
    """A vLLM `LLM` in this process, with exact log-probs."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    set_environment()
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    try:
        arguments = platform_arguments(model, settings.max_model_len) | settings.engine_arguments()
        llm = LLM(model, worker_extension_cls="rlhf_infer.vllm.worker.WorkerExtension", **arguments)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise not_started(model, error) from error
    llm.collective_rpc("return_exact_logps")
    return llm


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Leave the random states of Python, NumPy and torch as they were: vLLM seeds and uses them."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
