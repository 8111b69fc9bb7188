"""Code that runs inside vLLM: exact log-probs, and a server process that ends with its parent.

The file is self-contained, for a server may run under another Python: it is copied there, and imports nothing
of ours.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
import time
from typing import Any

NO_VLLM = 86
"""Exit status of a server whose Python has no vLLM."""
SMALL_HEADS = 87
"""Exit status of a server whose model has heads too small for this device; the last line it wrote says so."""
PARENT = "RLHF_VLLM_PARENT"
"""Environment variable with the process id of a server's parent."""
_CPU_HEAD = 32
"""Smallest size of an attention head that vLLM computes on CPUs."""
_CPU_BATCHED_TOKENS = 4096
"""vLLM's own default on CPUs for tokens of one forward pass."""


class SmallHeadsError(ValueError):
    """A model's attention heads are too small for vLLM on this device."""


class ExactSampler:
    """A vLLM sampler whose log-probs are of the whole vocabulary at each request's temperature.

    vLLM's own are either of the bare logits at temperature 1, or of what top-p, top-k, min-p and penalties
    left over; neither is what a trainer computes.  Greedy requests get them at temperature 1.

    The sampler is of vLLM's model runner, the first (`v1/sample`) or the second (`v1/worker/gpu/sample`).
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __call__(self, logits: Any, *args: Any, **kwargs: Any) -> Any:
        """Sample; `logits` (B, V) may be changed in place."""
        batch = args[0] if args else kwargs["sampling_metadata"]
        if getattr(batch, "max_num_logprobs", 0) is None:  # not requested
            return self._sampler(logits, *args, **kwargs)
        temperature = self._temperatures(batch)
        scaled = logits.float() if temperature is None else logits.float() / temperature
        logps = scaled.log_softmax(-1)
        output = self._sampler(logits, *args, **kwargs)
        if output.logprobs_tensors is not None:
            values = output.logprobs_tensors.logprobs
            values[:, :1] = logps.gather(-1, output.sampled_token_ids.long())
            if values.shape[1] > 1:  # the likeliest tokens
                likeliest = output.logprobs_tensors.logprob_token_ids[:, 1:].long()
                values[:, 1:] = logps.gather(-1, likeliest)
        return output

    def _temperatures(self, batch: Any) -> Any:
        """(B, 1) temperatures, 1 for greedy requests; None if all are greedy."""
        states = getattr(self._sampler, "sampling_states", None)
        values = batch.temperature if states is None else states.temperature.gpu[batch.expanded_idx_mapping]
        return None if values is None else values.where(values >= 1e-5, values.new_ones(()))[:, None]


class WorkerExtension:
    """Methods that vLLM's workers get through `worker_extension_cls`, for `collective_rpc`."""

    def return_exact_logps(self: Any) -> bool:
        """Let the worker return log-probs as `ExactSampler` does; calling it again changes nothing."""
        runner = self.model_runner
        if runner.sampler is not None and not isinstance(runner.sampler, ExactSampler):
            runner.sampler = ExactSampler(runner.sampler)
        return True

    def pack_heads(self: Any) -> None:
        """Pack the weights of output heads again, after `reload_weights`.

        On CPUs vLLM computes logits from a packed copy of the head's weights, and when it reloads it leaves
        that of a head tied to the embeddings as it was.
        """
        for layer in self.model_runner.get_model().modules():
            if hasattr(layer, "cpu_linear") and hasattr(layer, "num_embeddings_padded"):
                layer.quant_method.process_weights_after_loading(layer)


def platform_arguments(model: str, max_model_len: int | None) -> dict[str, Any]:
    """Engine arguments that the device asks for.

    On CPUs prompts must not be computed in pieces: vLLM turns the random state of a request back after each
    piece, which torch's CPU generators cannot do (`get_offset`).

    `max_model_len` of None is the model's context.

    Raises:
        SmallHeadsError: this is a CPU, and the model's heads are too small for vLLM's attention there.
    """
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    if not current_platform.is_cpu():
        return {}
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head < _CPU_HEAD:  # vLLM itself starts, and fails at the first request
        raise SmallHeadsError(
            f"on CPUs it needs attention heads of at least {_CPU_HEAD}, and the model's have {head}; "
            "use the transformers backend"
        )
    if max_model_len is None:
        max_model_len = config.max_position_embeddings
    tokens = max(_CPU_BATCHED_TOKENS, int(max_model_len or 0))
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": tokens}


def main() -> None:
    """Start vLLM's server with the arguments of the command line, to end with the process PARENT names."""
    if importlib.util.find_spec("vllm") is None:
        sys.exit(NO_VLLM)
    parent = int(os.environ[PARENT])
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    from vllm.entrypoints.launchers.api_server.entry import (  # pyright: ignore[reportMissingImports]
        main as serve,
    )

    values = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
    length = values.get("--max-model-len")
    try:
        arguments = platform_arguments(values["--model"], int(length) if length else None)
    except SmallHeadsError as error:
        print(error, file=sys.stderr)
        sys.exit(SMALL_HEADS)
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        sys.argv += [f"--no-{flag}"] if value is False else [f"--{flag}", str(value)]
    serve()


def _end_with_parent(parent: int) -> None:
    """Kill this process and its children, a process group, once the parent is gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main()
