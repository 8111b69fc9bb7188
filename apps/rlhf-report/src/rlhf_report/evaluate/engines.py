"""Engines for a model's completions: transformers, vLLM in this process, or a running vLLM server."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_data import TokenSequence, UserError
from rlhf_eval.evaluation import Policy
from rlhf_report.evaluate.sources import Source

if TYPE_CHECKING:
    from rlhf_infer import GenerationEngine, VLLMServerEngine

Engine = Callable[[], AbstractContextManager["GenerationEngine"]]
"""Makes an engine, which lives as long as the context."""
_PROBES, _TOKENS = 4, 16
_APART = 0.1
"""Nats a token by which a server's log-probs may differ from ours: far above what its precision costs."""


def check_engines(given: Mapping[str, Any], sources: Sequence[Source]) -> dict[str, str]:
    """Addresses of vLLM servers by the name of the model that each serves, from `[NAME=]URL`."""
    if given["backend"] == "vllm":
        from rlhf_infer import require_vllm

        require_vllm()
    elif given["vllm_gpu_memory_utilization"] is not None:
        raise UserError(
            "--vllm-gpu-memory-utilization is for --backend vllm; give both or none",
            code="conflicting_options",
        )
    names = [each.name for each in sources if not each.is_file]
    servers: dict[str, str] = {}
    for option in given["vllm_servers"]:
        name, equals, url = option.partition("=")
        if not equals or "://" in name:
            name, url = (names[0] if len(names) == 1 else ""), option
        if name not in names or not url.startswith(("http://", "https://")):
            raise UserError(
                f"--vllm-server {option}: expected NAME=URL, NAME one of {', '.join(names) or 'no model'}",
                code="invalid_option",
            )
        if name in servers:
            raise UserError(f"--vllm-server: two servers for {name}; give one", code="repeated_name")
        servers[name] = url.rstrip("/")
    return servers


def engine_of(
    source: Source, given: Mapping[str, Any], servers: Mapping[str, str], policy: Policy
) -> Engine | None:
    """The engine of a model's completions; None for transformers.

    `servers` is what `check_engines` returned.
    """
    if source.name in servers:
        return lambda: _server(servers[source.name], policy, source)
    if given["backend"] == "vllm":
        return lambda: _in_process(source, policy, given["vllm_gpu_memory_utilization"])
    return None


def engine_notes(given: Mapping[str, Any], servers: Mapping[str, str]) -> list[str]:
    """The engine's description in reports."""
    names = "all models" if given["backend"] == "vllm" else ", ".join(servers)
    return [f"vLLM drew the completions of {names}; log-probs and the KL are this toolkit's own."] * bool(
        names
    )


@contextmanager
def _server(url: str, policy: Policy, source: Source) -> Iterator[GenerationEngine]:
    from rlhf_infer import VLLMServerEngine

    engine = VLLMServerEngine(url, policy.tokenizer)
    try:
        check_server(engine, policy, source.path)
        yield engine
    finally:
        engine.close()


@contextmanager
def _in_process(source: Source, policy: Policy, memory: float | None) -> Iterator[GenerationEngine]:
    from rlhf_infer import VLLMEngine, VLLMSettings, write_weight_folder
    from rlhf_models import is_adapter

    options: dict[str, Any] = {"gpu_memory_utilization": memory} if memory else {}
    options["dtype"] = str(policy.model.dtype).removeprefix("torch.")
    settings = VLLMSettings.from_dict(options | {"enforce_eager": policy.model.device.type == "cpu"})
    with tempfile.TemporaryDirectory(prefix="rlhf-evaluate-") as folder:
        path = source.path
        if is_adapter(path):
            path = str(Path(folder) / "model")
            write_weight_folder(policy.model, path, tokenizer=policy.tokenizer)
        engine = VLLMEngine(path, policy.tokenizer, settings)
        try:
            yield engine
        finally:
            engine.close()


def check_server(engine: VLLMServerEngine, policy: Policy, model: str) -> None:
    """Refuse a server whose completions are not those of the model: its log-probs are compared with ours."""
    from rlhf_eval.evaluation.divergence import sequence_logps
    from rlhf_infer import SamplingParams
    from rlhf_models import evaluating

    start = policy.tokenizer.encode("The", add_special_tokens=True)
    drawn = [each for group in engine.generate([start], _PROBES, SamplingParams(_TOKENS)) for each in group]
    size = policy.model.get_input_embeddings().weight.shape[0]
    sequences = [TokenSequence([*start, *each.completion_ids], len(start)) for each in drawn]
    apart = float("inf")
    if all(token < size for each in drawn for token in each.completion_ids):
        with evaluating(policy.model):
            ours = sequence_logps(policy.model, sequences).tolist()
        count = sum(len(each.completion_ids) for each in drawn)
        apart = sum(abs(mine - sum(each.logps)) for mine, each in zip(ours, drawn, strict=True)) / count
    if not apart < _APART:
        raise UserError(
            f"the server at {engine.url} does not serve {model}: its log-probs differ from that model's by "
            f"{apart:.2g} nats a token; give the address of one that does"
        )
