"""`--backend trl`: the same settings, model and rows through TRL's own trainer, into the same run folder."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import importlib.util
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PrinterCallback,
)
from transformers.utils import logging as transformers_logging

from rlhf_algos import (
    METHODS,
    Clock,
    DPOConfig,
    SFTConfig,
    TrainerConfig,
    check_start,
    choose_precision,
    finish_run,
    job_device,
    load_rows,
    longest_sequence,
    lora_settings,
    save_pretrained,
    start_model,
)
from rlhf_algos.configs.trainer import LanguageModelConfig
from rlhf_algos.jobs.config import JobConfig
from rlhf_algos.jobs.data import Rows, conversion
from rlhf_algos.jobs.models import keep_base
from rlhf_algos.jobs.training_job import Job
from rlhf_data import UserError, atomic_folder, atomic_write_json, finite
from rlhf_models import apply_lora, is_language_adapter, quantization_config
from rlhf_train.trl.metrics import Recorder, log_to

_LOG = logging.getLogger(__name__)
_SAME_NAME = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2"),
    *("adam_epsilon", "max_grad_norm", "optim", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("num_train_epochs", "max_steps", "seed", "gradient_checkpointing", "torch_compile", "deepspeed"),
    *("logging_steps",),
)
_CONVERTED = {"max_length", "loss_type"}
"""Keys of methods that TRL takes in another form; the others go to TRL where it has them."""
_OURS_ALONE = (
    *("fsdp", "streaming", "truncation", "load_best_model_at_end", "early_stopping_patience"),
    *("head", "num_members", "ensemble", "kl_estimate", "capability_steps", "ewc_strength"),
)
"""Keys that must have their defaults: TRL cannot honour them, or only with checkpoints, which it pickles."""
_WITHOUT_EFFECT = (
    *("max_tokens_per_batch", "save_steps", "save_total_limit", "metric_for_best_model", "greater_is_better"),
    *("early_stopping_threshold", "debug_gradient_flow", "debug_activations", "sample_steps"),
    *("ref_kl_rows", "stage_samples", "dataloader_num_workers"),
)
"""Keys that TRL does not have, and that do not change the result."""


def check_settings(name: str, config: JobConfig) -> None:
    """Refuse settings that TRL cannot honour."""
    trainer = METHODS[name].trl
    if trainer is None:
        known = [method for method in METHODS if METHODS[method].trl]
        raise UserError(
            f"TRL has no trainer for {name}; choose one of {', '.join(known)}, or leave out --backend trl",
            code="trl_refuses",
        )
    for key in _changed(config, _OURS_ALONE):
        raise UserError(
            f"TRL cannot honour {key} {getattr(config, key)!r}; leave it out, or leave out --backend trl",
            code="trl_refuses",
        )
    experts = isinstance(config, LanguageModelConfig) and config.router_aux_loss_coef is not None
    if experts and "experimental" in trainer:
        raise UserError(
            f"TRL takes the weight of the routers' loss for {name} from the model's config; "
            "leave router_aux_loss_coef out, or leave out --backend trl",
            code="trl_refuses",
        )
    if isinstance(config, SFTConfig) and config.disable_dropout:
        raise UserError(
            "TRL cannot honour disable_dropout for sft; leave it out, or leave out --backend trl",
            code="trl_refuses",
        )
    if isinstance(config, DPOConfig) and config.label_smoothing and config.loss_type == "sigmoid":
        raise UserError(
            "TRL ignores label_smoothing with loss_type sigmoid; "
            "use loss_type robust, or leave out --backend trl",
            code="trl_refuses",
        )
    if ignored := _changed(config, _WITHOUT_EFFECT):
        _LOG.warning("without effect under --backend trl: %s", ", ".join(ignored))
    if importlib.util.find_spec("trl") is None:
        raise UserError(
            '--backend trl needs TRL, which is not installed; run pip install "rlhf-train[trl]"',
            code="missing_package",
        )


def _changed(config: JobConfig, keys: Sequence[str]) -> list[str]:
    """The keys that the config has and that are not at their defaults."""
    fields = type(config).model_fields
    return [key for key in keys if key in fields and getattr(config, key) != fields[key].default]


def dataset_rows(records: Sequence[Any]) -> list[dict[str, Any]]:
    """Records as rows of the columns that TRL's trainers read."""
    if len({type(record) for record in records}) > 1:
        raise UserError(
            "TRL reads one kind of rows at a time; give files of prompts with completions, or of texts",
            code="mixed_rows",
        )
    names = ("prompt", "completion", "chosen", "rejected", "messages", "text", "label", "margin")
    rows = []
    for record in records:
        row = {name: getattr(record, name) for name in names if getattr(record, name, None) is not None}
        rows.append(row | dict(record.template or {}))
    return rows


class TRLJob(Job):
    """One run of one method through TRL; see `rlhf_algos.TrainingJob`."""

    def train(self, *, resume: bool = False) -> dict[str, Any]:
        """Train and write everything; the results."""
        if resume:
            raise UserError(
                "a run of --backend trl has no checkpoints to resume from; start a new one",
                code="trl_refuses",
            )
        clock = Clock()
        with _quiet():
            trainer, rows, tokenizer, recorder = self._prepare()
            clock.lap("loading")
            before = recorder.clean(trainer.evaluate()) if rows.held_out else None
            recorder.start()
            clock.lap("evaluation")
            trainer.train()
            clock.lap("training")
            after = recorder.clean(trainer.evaluate()) if rows.held_out else None
            recorder.flush()
            self._save(trainer, tokenizer)
            clock.lap("evaluation")
        data = {"source": rows.source, "train_rows": len(trainer.train_dataset)}
        data |= {"eval_rows": len(trainer.eval_dataset or ()), "bad_rows": rows.skipped}
        results = {"before": before, "after": after, "wall_time": clock.split(), "resumed": False}
        results |= {"backend": "trl", "data": data, "num_tokens": recorder.num_tokens}
        if trainer.is_world_process_zero():
            results = finish_run(self.run, method=self.name, config=self.config.to_dict(), **results)
        return results

    def evaluate_only(self, checkpoint: Path | None = None) -> dict[str, Any]:
        """Held-out metrics of the start model by TRL's trainer; written to `evaluation.json`."""
        if checkpoint is not None:
            raise UserError(
                "checkpoints are evaluated by the engine that wrote them; leave out --backend trl",
                code="trl_refuses",
            )
        clock = Clock()
        with _quiet():
            trainer, rows, _, recorder = self._prepare()
            if not rows.held_out:
                raise UserError(
                    "there are no held-out rows to evaluate on; give some with --eval-data",
                    code="no_held_out_rows",
                )
            clock.lap("loading")
            metrics = recorder.clean(trainer.evaluate())
            clock.lap("evaluation")
        results = {"method": self.name, "backend": "trl", "checkpoint": None, "before": metrics}
        results |= {"wall_time": clock.split()}
        if trainer.is_world_process_zero():
            atomic_write_json(self.run.path / "evaluation.json", finite(results))
        return results

    def _prepare(self) -> tuple[Any, Rows, Any, Recorder]:
        self.check_inputs()
        check_start(self.method, self.config)
        rows = load_rows(self.method, self.config)
        recorder = Recorder(self.run, self.on_report)
        with tempfile.TemporaryDirectory(prefix="rlhf-trl-") as folder:  # TRL loads the reference from it
            model, tokenizer = self._model(rows, folder)
            trainer = self._trainer(model, tokenizer, rows, recorder)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(log_to(recorder))
        if trainer.is_world_process_zero():
            self.run.write_config({"method": self.name, **self.config.to_dict()})
        train, held_out = len(trainer.train_dataset), len(trainer.eval_dataset or ())
        _LOG.info("data: %s rows of %s, %s held out", f"{train:,}", rows.source, f"{held_out:,}")
        return trainer, rows, tokenizer, recorder

    def _model(self, rows: Rows, folder: str) -> tuple[Any, Any]:
        """The start model as plain transformers loads it from `folder`, and its tokenizer."""
        config, device = self.config, job_device()
        full = config.model_copy(update={"use_peft": False, "load_in_8bit": False, "load_in_4bit": False})
        model, tokenizer = start_model(self.method, full, rows.train)
        save_pretrained(model, None, folder)
        policy = self.method.model == "policy"
        auto: Any = AutoModelForCausalLM if policy else AutoModelForSequenceClassification
        options: dict[str, Any] = {"dtype": next(model.parameters()).dtype}
        quantised = quantization_config(config.load_in_8bit, config.load_in_4bit, device=device)
        if quantised is not None:
            options |= {"quantization_config": quantised, "device_map": {"": str(device)}}
        loaded = auto.from_pretrained(folder, **options)
        name = config.model_name_or_path
        if config.use_peft and name and not is_language_adapter(name):
            loaded.name_or_path = name  # the adapter's config names it
        elif config.use_peft:
            keep_base(loaded, tokenizer, self.run.path / "base")
        return loaded, tokenizer

    def _trainer(self, model: Any, tokenizer: Any, rows: Rows, recorder: Recorder) -> Any:
        from datasets import Dataset

        trainer_class, config_class = _classes(self.method.trl)
        convert = conversion(self.config, rows, tokenizer) or (lambda record: record)
        train, held_out = ([convert(record) for record in side] for side in (rows.train, rows.held_out))
        with _refusals():
            arguments = config_class(**self._arguments(config_class, model, rows))
            return trainer_class(
                model=model,
                args=arguments,
                train_dataset=Dataset.from_list(dataset_rows(train)),
                eval_dataset=Dataset.from_list(dataset_rows(held_out)) if held_out else None,
                processing_class=_as_trl_writes(tokenizer),
                peft_config=_peft_config(model, self.config) if self.config.use_peft else None,
            )

    def _arguments(self, config_class: Any, model: Any, rows: Rows) -> dict[str, Any]:
        """TRL's arguments for the job's settings."""
        config = self.config
        own = self.method.config_class.model_fields.keys() - TrainerConfig.model_fields.keys() - _CONVERTED
        known = own & {field.name for field in dataclasses.fields(config_class)}
        precision, _ = choose_precision(config, job_device(), next(model.parameters()).dtype)
        arguments = {key: getattr(config, key) for key in (*_SAME_NAME, *sorted(known))}
        arguments |= {
            "output_dir": str(self.run.path),
            "max_length": longest_sequence(model.config, config.max_length),
            "bf16": precision == "bf16",
            "fp16": precision == "fp16",
            "train_sampling_strategy": "random" if config.shuffle else "sequential",
            "per_device_eval_batch_size": config.per_device_train_batch_size,
            "eval_strategy": "steps" if config.eval_steps and rows.held_out else "no",
            "eval_steps": config.eval_steps,
            "save_strategy": "no",
            "report_to": list(config.report_to) or "none",
            "disable_tqdm": True,
            "use_cpu": job_device().type == "cpu",
        }
        if config.lr_scheduler_type == "constant" and config.warmup_steps:
            arguments["lr_scheduler_type"] = "constant_with_warmup"
        if isinstance(config, DPOConfig):
            arguments["loss_type"] = [config.loss_type]
        return {**arguments, **self.method.trl_arguments}

    def _save(self, trainer: Any, tokenizer: Any) -> None:
        if trainer.is_world_process_zero():
            with atomic_folder(self.run.path / "final") as folder:
                save_pretrained(trainer.accelerator.unwrap_model(trainer.model), tokenizer, folder)


def _classes(trainer: str | None) -> tuple[Any, Any]:
    """TRL's trainer, and the config class of the same module."""
    assert trainer is not None
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    place, _, name = trainer.rpartition(".")
    module = importlib.import_module(place)
    return getattr(module, name), getattr(module, f"{name.removesuffix('Trainer')}Config")


def _as_trl_writes(tokenizer: Any) -> Any:
    """A copy with which TRL's texts become the same tokens as in this engine.

    TRL writes the end token as text, and its CPO puts a start token in front even where the tokenizer itself
    does not.
    """
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.split_special_tokens = False
    if tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] != [tokenizer.bos_token_id]:
        tokenizer.bos_token = None
    return tokenizer


def _peft_config(model: Any, config: JobConfig) -> Any:
    """A peft config for the adapters that this engine would add."""
    with torch.device("meta"):
        shape = type(model)(model.config)
        return apply_lora(shape, lora_settings(config)).peft_config["default"]


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turn TRL's refusals into user errors."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"TRL refuses this job: {reason}", code="trl_refuses") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Turn off telemetry, progress bars, and warnings about TRL's own settings."""
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it had to guess
    huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import datasets

        datasets.disable_progress_bars()
        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()
        yield
