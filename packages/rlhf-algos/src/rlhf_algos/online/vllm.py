"""The vLLM engine of an online job, as its settings ask for it."""

from __future__ import annotations

import contextlib
from typing import Any

from rlhf_algos.engine.parallel import choose_precision
from rlhf_algos.process_group import broadcast, is_main_process, world_size
from rlhf_data import RunFolder, UserError
from rlhf_infer import (
    GenerationEngine,
    SamplingParams,
    VLLMEngine,
    VLLMServer,
    VLLMServerEngine,
    VLLMSettings,
    write_weight_folder,
)
from rlhf_models import is_language_adapter

__all__ = ["vllm_engine"]

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def vllm_engine(config: Any, model: Any, tokenizer: Any, run: RunFolder) -> GenerationEngine:
    """An engine in this process, or on a server that is named or started now.

    It computes in the precision of the training, so that the log-probs of both are alike.

    Args:
        config: the job's settings.
        model: the policy.
        tokenizer: of the policy.
        run: its folder gets the start model where vLLM can read it nowhere else.

    Raises:
        UserError: vLLM is missing or cannot start, or its log-probs cannot be compared with the trainer's.
    """
    settings = _settings(config, model)
    if config.vllm_mode == "colocate":
        start = _start_folder(config, model, tokenizer, run)
        engine: Any = VLLMEngine(start, tokenizer, settings, timeout_s=config.vllm_server_timeout)
    else:
        engine = _on_server(config, settings, model, tokenizer, run)
    params = SamplingParams(config.max_completion_length, config.temperature, top_p=config.top_p)
    if config.vllm_importance_sampling_correction and not engine.exact_logps(params):
        engine.close()
        raise UserError(
            f"the server at {config.vllm_server_base_url} gives log-probs that cannot be compared with the "
            "trainer's at this temperature; start it with --logprobs-mode processed_logprobs, or set "
            "vllm_importance_sampling_correction to false"
        )
    return engine


def _on_server(config: Any, settings: VLLMSettings, model: Any, tokenizer: Any, run: RunFolder) -> Any:
    options = {"lora": config.vllm_sync_adapters, "timeout_s": config.vllm_server_timeout}
    options["sync_folder"] = run.path / "vllm_weights" if world_size() > 1 else None
    address = config.vllm_server_base_url
    if address is None and is_main_process():
        server = VLLMServer(_start_folder(config, model, tokenizer, run), settings)
        engine = VLLMServerEngine(server, tokenizer, **options)
        broadcast(server.url)
        return engine
    return VLLMServerEngine(address or broadcast(None), tokenizer, **options)


def _settings(config: Any, model: Any) -> VLLMSettings:
    precision, _ = choose_precision(config, model.device, model.dtype)
    on_cpu = model.device.type == "cpu"
    return VLLMSettings.from_dict(
        {
            "dtype": _DTYPES.get(precision, str(model.dtype).removeprefix("torch.")),
            "gpu_memory_utilization": config.vllm_gpu_memory_utilization,
            "kv_cache_gib": config.vllm_kv_cache_gib,
            "max_model_len": config.vllm_max_model_length,
            "max_lora_rank": config.lora_r if config.vllm_sync_adapters else None,
            "tensor_parallel_size": config.vllm_tensor_parallel_size,
            "enforce_eager": on_cpu,
            "seed": config.seed,
        }
    )


def _start_folder(config: Any, model: Any, tokenizer: Any, run: RunFolder) -> str:
    """Where vLLM reads the model from before it gets the policy's weights."""
    name = config.model_name_or_path
    if name and not is_language_adapter(name):
        return name
    folder = run.path / "base"
    if not folder.is_dir():
        apart = model.disable_adapter() if config.vllm_sync_adapters else contextlib.nullcontext()
        with apart:  # adapters that are handed over by themselves are no part of it
            write_weight_folder(model, folder, tokenizer=tokenizer)
    return str(folder)
