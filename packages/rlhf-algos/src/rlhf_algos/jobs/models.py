"""The model of a job before its first step: loaded, from scratch or tiny, with its head or adapters."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedConfig

from rlhf_algos.configs.offline import PRMConfig
from rlhf_algos.engine.optimizer import check_optimizer
from rlhf_algos.jobs.chat_setup import set_chat_format, warn_of_endless_turns
from rlhf_algos.jobs.config import AdapterConfig, EnsembleConfig, HeadConfig, JobConfig
from rlhf_algos.jobs.tiny_models import scratch_tokenizer, tiny_start
from rlhf_algos.parallel.deepspeed_file import shards_weights
from rlhf_algos.parallel.memory_plan import Machine
from rlhf_algos.parallel.precision import check_hardware
from rlhf_algos.process_group import barrier, init_process_group, is_main_process, world_size
from rlhf_algos.tracking.trackers import check_trackers
from rlhf_data import UserError
from rlhf_models import (
    JudgeModel,
    LoraSettings,
    ProcessRewardModel,
    RewardEnsemble,
    RewardModel,
    adapter_base,
    apply_lora,
    build_model,
    check_language_model,
    check_tokenizer_fits,
    context_length,
    generation_length,
    is_language_adapter,
    load_causal_lm,
    load_merged,
    load_tokenizer,
    make_deterministic,
    quantization_config,
    save_model,
)

if TYPE_CHECKING:
    from rlhf_algos.jobs.methods import Method

_LOG = logging.getLogger(__name__)


def job_device() -> torch.device:
    """Where this process's model is loaded: its GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def check_start(method: Method, config: JobConfig, machine: Machine | None = None) -> None:
    """Refuse what needs another machine, more processes or another model, before rows or weights are read.

    Args:
        method: what is trained.
        config: the job's settings.
        machine: what it is planned for; None is this machine with the processes that torchrun started.

    Raises:
        UserError: see `check_hardware`, `check_optimizer` and `check_trackers`; quantisation without
            bitsandbytes, or of weights that are sharded; a reward model where a language model is trained.
    """
    processes = machine.processes if machine else world_size()
    elsewhere = {"fp16": None, "activation_offloading": False, "optim": "adamw_torch", "report_to": ()}
    here = config.model_copy(update=elsewhere) if machine and machine.card else config
    check_hardware(here, job_device(), _dtype(config), world_size=processes)
    check_optimizer(here.optim, job_device())
    check_trackers(here.report_to)
    if config.load_in_8bit and (config.fsdp or (processes > 1 and shards_weights(config))):
        raise UserError(
            "8-bit weights are not sharded; set load_in_4bit in place of load_in_8bit, or leave out fsdp and "
            "ZeRO-3: with ZeRO-2 each process holds the quantised model",
            code="quantised_and_sharded",
        )
    quantization_config(config.load_in_8bit, config.load_in_4bit)
    name = config.model_name_or_path
    if name and method.model == "policy" and not is_language_adapter(name):
        check_language_model(name)


def longest_sequence(
    model_config: PreTrainedConfig, max_length: int | None, *, generates: bool = False
) -> int | None:
    """Tokens that a sequence may have: `max_length`, or the model's context where that is shorter.

    For a model that `generates` in training the context is its `generation_length`.
    """
    context = generation_length(model_config) if generates else context_length(model_config)
    if context is None or (max_length is not None and max_length <= context):
        return max_length
    if max_length is not None:
        _LOG.warning("max_length %d exceeds the model's context; using %d", max_length, context)
    return context


def start_model(
    method: Method, config: JobConfig, records: Sequence[Any], *, base_folder: Path | None = None
) -> tuple[Any, Any]:
    """The model to train, on its device, and its tokenizer.

    A language model that is given as an adapter's folder has the adapter merged into it.

    Args:
        method: what is trained.
        config: the job's settings.
        records: training records, from which a tokenizer and a tiny model are made if none is given.
        base_folder: where a model that was made now is kept if adapters are trained on it, which need it.

    Raises:
        UserError: the model cannot be loaded, or does not go with the settings.
    """
    if config.full_determinism:
        make_deterministic()
    name = config.model_name_or_path
    options: dict[str, Any] = {"dtype": config.dtype, "device": job_device()}
    options |= {"load_in_8bit": config.load_in_8bit, "load_in_4bit": config.load_in_4bit}
    if sharded := shards_weights(config) and world_size() > 1:
        init_process_group()
        options["sharded"] = True
    merged = name is not None and is_language_adapter(name)
    if name and method.model != "policy" and not merged:
        scorer = _scorer(method, config, "from_language_model", name, **options)
        set_chat_format(scorer, scorer.tokenizer, config)
        _describe(scorer, f"from {name}")
        return _finished(method, scorer, config), scorer.tokenizer
    if sharded and config.scratch and base_folder:
        lm, tokenizer = _made_by_one(config, records, base_folder, options)
    else:
        lm, tokenizer = _language_model(method, config, records, options, merged=merged)
    set_chat_format(lm, tokenizer, config)
    if method.model == "policy":
        warn_of_endless_turns(lm, tokenizer, records)
    if base_folder and not lm.name_or_path and _trains_adapters(config):
        keep_base(lm, tokenizer, base_folder)
    model = lm if method.model == "policy" else _scorer(method, config, "from_backbone", lm, tokenizer)
    return _finished(method, model, config), tokenizer


def _language_model(
    method: Method, config: JobConfig, records: Sequence[Any], options: dict[str, Any], *, merged: bool
) -> tuple[Any, Any]:
    """The language model that a job starts from, and its tokenizer; `merged` where an adapter is given."""
    name, device = config.model_name_or_path, options["device"]
    if name and merged:
        weights = "quantised" if config.load_in_8bit or config.load_in_4bit else "sharded"
        if weights == "quantised" or "sharded" in options:
            raise UserError(
                f"{name} holds an adapter, which cannot be merged into {weights} weights; merge it first, as "
                f"rlhf-merge passthrough DIR --model {adapter_base(name)}+{name} does",
                code="adapter_not_merged",
            )
        lm, tokenizer = load_merged(name, dtype=config.dtype, device=device)
        _describe(lm, f"from the adapter {name} merged into {adapter_base(name)}")
    elif name:
        lm, tokenizer = load_causal_lm(name, **options), load_tokenizer(name)
        check_tokenizer_fits(lm, tokenizer)
        _describe(lm, f"from {name}")
    elif config.scratch:
        tokenizer = scratch_tokenizer(config.scratch, records)
        lm = build_model(config.scratch, tokenizer=tokenizer, seed=config.seed)
        lm.to(device, _dtype(config))  # pyright: ignore[reportCallIssue, reportArgumentType]
        _describe(lm, f"with random weights, as {config.scratch} says")
    else:
        lm, tokenizer = tiny_start(
            records,
            fine_tuned=method.records != "sft" and not (method.online and config.train_data),
            seed=config.seed,
            separator=getattr(config, "step_separator", "\n"),
            max_length=config.max_length,
        )
        lm.to(device, _dtype(config))
    return lm, tokenizer


def _made_by_one(
    config: JobConfig, records: Sequence[Any], folder: Path, options: dict[str, Any]
) -> tuple[Any, Any]:
    """A sharded model from scratch, and its tokenizer: the first process makes and keeps it, all read it."""
    assert config.scratch
    if is_main_process() and not folder.exists():
        tokenizer = scratch_tokenizer(config.scratch, records)
        save_model(build_model(config.scratch, tokenizer=tokenizer, seed=config.seed), tokenizer, folder)
    barrier()
    lm = load_causal_lm(folder, **options)
    _describe(lm, f"with random weights, as {config.scratch} says")
    return lm, load_tokenizer(folder)


_SCORERS: dict[str, Any] = {"reward": RewardModel, "judge": JudgeModel, "prm": ProcessRewardModel}


def _scorer(method: Method, config: JobConfig, maker: str, *source: Any, **options: Any) -> Any:
    """A scoring model, or an ensemble, by one of the constructors that all of them have."""
    assert isinstance(config, HeadConfig)
    options |= {"head": config.head, "seed": config.seed}
    if not isinstance(config, EnsembleConfig) or config.num_members == 1:
        return getattr(_SCORERS[method.model], maker)(*source, **options)
    if config.use_peft and config.ensemble == "independent":
        raise UserError("independent members train in full; with use_peft take ensemble adapters or heads")
    adapted = _trains_adapters(config)
    options |= {"size": config.num_members, "kind": config.ensemble}
    options["lora"] = lora_settings(config) if adapted else None
    return getattr(RewardEnsemble, maker)(*source, **options)


def _finished(method: Method, model: Any, config: JobConfig) -> Any:
    """The model with what its method reads texts by, and with adapters where they are wanted."""
    if method.model in ("reward", "judge"):
        model.append_eos = True
    if method.model == "prm":
        settings = cast(PRMConfig, config)
        model.step_separator, model.aggregate = settings.step_separator, settings.aggregate
    if not config.use_peft or isinstance(model, RewardEnsemble):
        return model
    if method.model == "policy":
        return apply_lora(model, lora_settings(config), seed=config.seed)
    return model.add_lora(lora_settings(config), seed=config.seed)


def keep_base(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model that was made now, so that adapters trained on it can name what they belong to."""
    if is_main_process() and not folder.exists():
        save_model(model, tokenizer, folder)
    model.name_or_path = model.config._name_or_path = str(folder.absolute())


def _trains_adapters(config: JobConfig) -> bool:
    return config.use_peft or (isinstance(config, EnsembleConfig) and config.ensemble == "adapters")


def lora_settings(config: AdapterConfig) -> LoraSettings:
    """The adapters that a job's settings ask for."""
    return LoraSettings(**{name: getattr(config, name) for name in LoraSettings.model_fields})


def _dtype(config: JobConfig) -> torch.dtype:
    return torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)


def _describe(model: Any, origin: str) -> None:
    # In 4 bits a parameter has two weights to the byte.
    count = sum((2 if each.dtype == torch.uint8 else 1) * each.numel() for each in model.parameters())
    _LOG.info("model: %s of %s parameters, %s", type(model).__name__, f"{count:,}", origin)
