"""Parts of an online job besides model and data: rewards, engine, value model, pre-flight checks."""

from __future__ import annotations

import contextlib
import copy
import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlhf_algos.configs.online import PPOConfig
from rlhf_algos.distributed.config import require_ray, samplers, told_to
from rlhf_algos.jobs.config import AdapterConfig, JobConfig, OnlineJobConfig
from rlhf_algos.jobs.models import job_device, lora_settings
from rlhf_algos.online.base import OnlineTrainer
from rlhf_algos.online.first_rollout import check_first_rollout
from rlhf_algos.online.ppo import start_value_model
from rlhf_algos.online.step_engine import sampling_params
from rlhf_algos.parallel.deepspeed_file import shards_weights
from rlhf_algos.parallel.precision import HALF, choose_precision
from rlhf_algos.process_group import broadcast, is_main_process, world_size
from rlhf_data import RunFolder, UserError, atomic_write_json, model_folder
from rlhf_infer import (
    GenerationEngine,
    RewardFunctionFactory,
    RewardFunctions,
    TransformersEngine,
    VLLMEngine,
    VLLMServer,
    VLLMServerEngine,
    VLLMSettings,
    require_vllm,
    write_weight_folder,
)
from rlhf_models import (
    ENSEMBLE_FILE,
    ValueHead,
    ValueModel,
    adapter_base,
    adapter_config,
    brings_head,
    check_scoring_model,
    check_weights,
    context_length,
    is_adapter,
    is_language_adapter,
    load_config,
    load_tokenizer,
)

_LOG = logging.getLogger(__name__)
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
PREFLIGHT = "preflight.json"
_HOLDS_MODELS = ("model:", "process:", "constitutional:", "judge:path=")
"""Beginnings of reward lines whose options name models."""


def check_parts(config: JobConfig, *, elsewhere: bool = False) -> None:
    """Refuse the rewards, value model and engine of an online job that cannot be made; no model is loaded.

    With `elsewhere` it runs on another machine, and what is installed here says nothing.

    Not covered: models that lines beginning with `constitutional:` or `judge:path=` name, and whether a URL
    answers.
    """
    if not isinstance(config, OnlineJobConfig):
        return
    _check_models(config, elsewhere=elsewhere)
    for spec in config.reward:
        if not _names_models(spec):
            RewardFunctionFactory.from_spec(spec)


def _names_models(spec: str) -> bool:
    """Whether a reward line names models, which are slow to load."""
    return spec.startswith(_HOLDS_MODELS) or _is_model(spec)


def _is_model(spec: str) -> bool:
    """Whether a reward line is the folder or hub name of a model."""
    return bool(spec) and ":" not in spec and ("/" in spec or Path(spec).is_dir())


def _check_models(config: OnlineJobConfig, *, elsewhere: bool = False) -> None:
    cluster = samplers(config)
    if cluster:
        require_ray(cluster)
    elif config.use_vllm and not (elsewhere or config.vllm_server_base_url):
        require_vllm()
    for spec in config.reward:
        if name := spec if _is_model(spec) else RewardFunctionFactory.model_in(spec):
            _check_model(name, two_labels=True)
    if isinstance(config, PPOConfig) and config.value_model_path:
        _check_model(config.value_model_path)
        name = model_folder(config.value_model_path)
        if is_adapter(name) and adapter_config(name).task_type == "SEQ_CLS":
            raise UserError(
                f"value_model_path {name} is a reward model's adapter, whose head does not fit a value "
                "model; name a reward model that was trained without use_peft",
                code="wrong_model_kind",
                key="value_model_path",
            )


def check_value_model(config: JobConfig, tokenizer: Any, max_length: int | None) -> None:
    """Refuse a `value_model_path` with another tokenizer than the policy's, or a shorter context.

    Args:
        config: the job's settings.
        tokenizer: the policy's.
        max_length: tokens that a prompt and its completion may have; None without a limit.
    """
    if not isinstance(config, PPOConfig) or not config.value_model_path:
        return
    name = model_folder(config.value_model_path)
    base = adapter_base(name) if is_adapter(name) else name
    own, special = load_tokenizer(name).get_vocab(), set(tokenizer.all_special_tokens)
    ids = tokenizer.get_vocab()
    if other := min((token for token in ids.keys() - special if own.get(token) != ids[token]), default=None):
        raise UserError(
            f"value_model_path {name} has another tokenizer than the policy: token {other!r} is "
            f"{own.get(other, 'not in it')}, and {ids[other]} for the policy; name a model trained with the "
            "policy's tokenizer, or leave it out to start from the policy",
            code="other_tokenizer",
            key="value_model_path",
        )
    context = context_length(load_config(base))
    if context is not None and (max_length is None or context < max_length):
        raise UserError(
            f"value_model_path {name} reads {context} tokens, and a prompt with its completion may have "
            f"{max_length or 'any number'}; set max_prompt_length and max_completion_length so that both "
            f"together are {context} at most, or name another model",
            code="context_too_short",
            key="value_model_path",
        )


def _check_model(name: str, *, two_labels: bool = False) -> None:
    """Refuse a model that is not there, or that has no scalar head; see `check_scoring_model`."""
    name = model_folder(name)
    if (Path(name) / ENSEMBLE_FILE).is_file():
        return
    base = adapter_base(name) if is_adapter(name) else name
    if not (base != name and brings_head(name)):
        check_scoring_model(base, two_labels=two_labels)
    load_config(base)
    if base == name:
        check_weights(name)


def load_rewards(config: OnlineJobConfig) -> RewardFunctions | None:
    """The rewards of a job, None if reward workers load them; all are checked before a model is loaded."""
    if (workers := samplers(config)) and workers.reward_workers:
        check_parts(config)
        return None
    _check_models(config)
    build, options = RewardFunctionFactory.from_spec, {"device": job_device()}
    lines = list(enumerate(config.reward))
    made = {i: build(spec) for i, spec in lines if not _names_models(spec)}
    made |= {i: build(spec, model_options=options) for i, spec in lines if i not in made}
    functions = [made[i] for i, _ in lines]
    return RewardFunctions(functions, weights=config.reward_weights)


def online_parts(
    config: OnlineJobConfig, model: Any, tokenizer: Any, run: RunFolder, rewards: RewardFunctions | None
) -> dict[str, Any]:
    """Arguments of an online trainer besides those of every trainer."""
    parts: dict[str, Any] = {"rewards": rewards}
    if isinstance(config, PPOConfig):
        parts["value_model"] = _value_model(config, model, tokenizer)
    if samplers(config):
        parts |= worker_parts(config, model, tokenizer, run, rewards)
    elif config.use_vllm:
        parts["engine"] = vllm_engine(config, model, tokenizer, run)
    return parts


def worker_parts(
    config: OnlineJobConfig, model: Any, tokenizer: Any, run: RunFolder, rewards: RewardFunctions | None
) -> dict[str, Any]:
    """An engine over workers on a Ray cluster, and the rewards, or reward workers if they load the rewards.

    Events of workers are written to `workers.jsonl`.
    """
    from rlhf_algos.distributed.controller import Controller
    from rlhf_algos.distributed.ledger import FILE
    from rlhf_algos.distributed.scoring import PooledRewards, RewardSetup
    from rlhf_algos.distributed.shared import SharedController
    from rlhf_algos.distributed.worker import EngineSetup, WorkerRole, frame_of

    assert config.distributed is not None
    half = HALF.get(choose_precision(config, model.device, model.dtype)[0])
    setup = EngineSetup(
        config.max_kv_tokens,
        torch.get_num_threads(),
        half=half and str(half).removeprefix("torch."),
        vllm=_settings(config, model) if config.use_vllm else None,
        timeout=config.vllm_server_timeout,
    )
    specs = tuple(map(RewardFunctionFactory.with_absolute_paths, config.reward))
    scoring = RewardSetup(specs, config.reward_weights, copy.deepcopy(tokenizer), torch.get_num_threads())
    make = partial(
        Controller,
        config.distributed,
        setup,
        {"": WorkerRole(model, tokenizer, frame=frame_of(model) if shards_weights(config) else None)},
        eos_token_ids=TransformersEngine(model, tokenizer).eos_token_ids,
        prompts_per_batch=config.prompts_per_batch,
        ledger=run.path / FILE,
        tell=told_to(run),
    )
    engine: Any = make() if world_size() == 1 else SharedController(make)
    try:
        return {"engine": engine, "rewards": rewards or PooledRewards(engine, scoring)}
    except BaseException:
        engine.close()
        raise


def _value_model(config: PPOConfig, model: Any, tokenizer: Any) -> ValueModel | ValueHead:
    """The value model that PPO starts with; with adapters where the policy has some."""
    value_model = start_value_model(model, tokenizer, config)
    if isinstance(value_model, ValueModel) and isinstance(config, AdapterConfig) and config.use_peft:
        value_model.add_lora(lora_settings(config), seed=config.seed)
    return value_model


def tell_findings(trainer: OnlineTrainer, run: RunFolder) -> None:
    """Sample the first prompts, warn of what would leave no learning signal, and write `preflight.json`."""
    findings = check_first_rollout(trainer)
    if not trainer.parallel.is_main:
        return
    for finding in findings:
        _LOG.warning("%s", finding.text)
    rows = [{"level": each.level, "name": each.name, "text": each.text} for each in findings]
    atomic_write_json(run.path / PREFLIGHT, rows)


def vllm_engine(config: OnlineJobConfig, model: Any, tokenizer: Any, run: RunFolder) -> GenerationEngine:
    """An engine in this process, or on a server that is named or started now.

    It computes in the precision of the training, so that both compute similar log-probs.  The start model is
    written into the folder of the run if vLLM cannot read it elsewhere.

    Raises:
        UserError: the server's log-probs cannot be compared with the trainer's, as the correction needs.
    """
    settings = _settings(config, model)
    if config.vllm_mode == "colocate":
        start = _start_folder(config, model, tokenizer, run)
        engine: Any = VLLMEngine(start, tokenizer, settings, timeout_s=config.vllm_server_timeout)
    else:
        engine = _on_server(config, settings, model, tokenizer, run)
    params = sampling_params(config, config.seed)
    if config.vllm_importance_sampling_correction and not engine.exact_logps(params):
        engine.close()
        raise UserError(
            f"the server at {config.vllm_server_base_url} gives log-probs that cannot be compared with the "
            "trainer's: at temperatures other than 1 it must be started with --logprobs-mode "
            "processed_logprobs, and then top_p, top_k, min_p, repetition_penalty and min_completion_length "
            "must be left out; or set vllm_importance_sampling_correction to false",
            code="inexact_logps",
        )
    return engine


def _on_server(
    config: OnlineJobConfig, settings: VLLMSettings, model: Any, tokenizer: Any, run: RunFolder
) -> Any:
    options = {"lora": config.vllm_sync_adapters, "timeout_s": config.vllm_server_timeout}
    options["sync_folder"] = run.path / "vllm_weights" if world_size() > 1 else None
    address = config.vllm_server_base_url
    if address is None and is_main_process():
        server = VLLMServer(_start_folder(config, model, tokenizer, run), settings)
        engine = VLLMServerEngine(server, tokenizer, **options)
        broadcast(server.url)
        return engine
    return VLLMServerEngine(address or broadcast(None), tokenizer, **options)


def _settings(config: OnlineJobConfig, model: Any) -> VLLMSettings:
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


def _start_folder(config: OnlineJobConfig, model: Any, tokenizer: Any, run: RunFolder) -> str:
    """Where vLLM reads the model from before it gets the policy's weights."""
    name = config.model_name_or_path
    if name and not is_language_adapter(name):
        return name
    folder = run.path / "base"
    if not folder.is_dir():
        apart = model.disable_adapter() if config.vllm_sync_adapters else contextlib.nullcontext()
        with apart:  # adapters that are handed over by themselves are not part of it
            write_weight_folder(model, folder, tokenizer=tokenizer)
    return str(folder)
