"""The two sides of `offline_vs_trl.py`: one process each, which trains a step whenever it is told to."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import warnings
import zlib
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_NAMES = {"sft": "SFT", "reward": "Reward", "dpo": "DPO", "simpo": "SimPO", "kto": "KTO"}
METHODS = tuple(_NAMES)
LORA: dict[str, Any] = {"lora_r": 16, "lora_alpha": 32}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BOTH: dict[str, dict[str, Any]] = {
    "simpo": {"beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0, "max_length": 1024},
}
"""Settings of a method that both sides get, because their defaults differ."""
BEST: dict[str, dict[str, Any]] = {
    "sft": {"padding_free": True, "max_length": None},
    "dpo": {"precompute_ref_log_probs": True},
    "kto": {"precompute_ref_log_probs": True},
}
"""What makes the peer fastest here, besides batches of rows of like length."""


@dataclass(frozen=True)
class Task:
    """What a side is to train.

    Args:
        side: "ours" or "trl".
        method: one of `METHODS`.
        lora: whether adapters are trained, or all weights.
        best: whether the peer's best settings are taken, or its defaults.
        model: folder of the start model.
        rows: JSONL file of the training rows.
        batch_size: rows in a step.
        threads: torch's.
        max_tokens_per_batch: our token budget.
    """

    side: str
    method: str
    lora: bool
    best: bool
    model: str
    rows: str
    batch_size: int
    threads: int
    max_tokens_per_batch: int


class Pace:
    """Lets the training process do one step each time the parent says so, and reports it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._started = pipe, 0.0
        self.losses: list[float] = []

    def ready(self, config: dict[str, Any], tokens: list[int] | None = None) -> None:
        """Everything is loaded: say with which settings, and wait for the first step."""
        self._pipe.send({"config": config, "tokens": tokens, "memory_mb": peak_memory_mb()})
        self._wait()

    def step_done(self) -> None:
        """A step is over: report it, and wait for the next one, or for the other side's last."""
        seconds = time.perf_counter() - self._started
        self._pipe.send({"seconds": seconds, "loss": self.losses[-1], "memory_mb": peak_memory_mb()})
        self._wait()

    def _wait(self) -> None:
        self._pipe.recv()
        self._started = time.perf_counter()


def work(task: Task, pipe: Connection) -> None:
    """Entry of a side's process."""
    os.environ |= {"OMP_NUM_THREADS": str(task.threads), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ["XDG_CACHE_HOME"] = task.rows + f".{task.side}.cache"  # nothing is precomputed before the run
    print_to_stderr()
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(task.threads)
    {"ours": _train_ours, "trl": _train_trl}[task.side](task, Pace(pipe))


def print_to_stderr() -> None:
    """Keep whatever libraries print in this process out of the parent's output."""
    os.dup2(2, 1)


def peak_memory_mb() -> float:
    """The most resident memory that this process has had, in MB; on CUDA, that of the device."""
    torch = sys.modules["torch"]
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e6
    status = Path("/proc/self/status")
    if status.exists():  # unlike getrusage, it does not start from the parent's memory
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def _train_ours(task: Task, pace: Pace) -> None:
    import rlhf_algos
    from rlhf_data import KTODataset, PreferenceDataset, SFTDataset, load_records
    from rlhf_models import load_causal_lm, load_tokenizer

    kind: Any = {"sft": "sft", "kto": "kto"}.get(task.method, "preference")
    name, tokenizer = _NAMES[task.method], load_tokenizer(task.model)
    records = load_records(task.rows, kind).records
    settings: dict[str, Any] = {
        "shuffle": False,
        "num_train_epochs": 1,
        "per_device_train_batch_size": task.batch_size,
        "max_tokens_per_batch": task.max_tokens_per_batch,
        "save_steps": None,
        "bf16": False,
        **BOTH.get(task.method, {}),
    }
    if task.best and task.method in ("dpo", "kto"):
        settings["precompute_ref_log_probs"] = True
    config: Any = getattr(rlhf_algos, f"{name}Config")(**settings)
    model: Any
    if task.method == "reward":
        from rlhf_models import LoraSettings, RewardModel

        model = RewardModel.from_pretrained(task.model, dtype="float32")
        model = model.add_lora(LoraSettings(**LORA)) if task.lora else model
    else:
        model = load_causal_lm(task.model, dtype="float32")
        if task.lora:
            from rlhf_models.adapters.lora import LoraSettings, apply_lora

            model = apply_lora(model, LoraSettings(**LORA))
    model = model.to("cuda") if _cuda() else model
    same_adapters(model)
    if kind == "sft":
        examples: Any = SFTDataset(records, tokenizer)
    elif kind == "kto":
        examples = KTODataset(records, tokenizer, kl_batch_size=task.batch_size)
    else:
        examples = PreferenceDataset(
            records, tokenizer, overlong="drop" if task.method == "reward" else "truncate"
        )
    trainer = getattr(rlhf_algos, f"{name}Trainer")(model, config, examples)

    def on_step(step: int, metrics: dict[str, float]) -> None:
        pace.losses.append(metrics["loss"])
        pace.step_done()

    trainer.on_step = on_step
    size = task.batch_size
    tokens = [
        sum(len(s.input_ids) for i in range(start, start + size) for s in trainer.sequences(examples[i]))
        for start in range(0, len(examples), size)
    ]
    pace.ready(config.model_dump(mode="json"), tokens)
    trainer.train()


def _train_trl(task: Task, pace: Pace) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback

    config_class, trainer_class = _trl_classes(task.method)

    class Callback(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step:
                pace.step_done()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            pace.step_done()

    class Trainer(trainer_class):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            pace.losses.append((loss[0] if isinstance(loss, tuple) else loss).item())
            return loss

    settings = {
        "output_dir": f"{task.rows}.trl",
        "use_cpu": not _cuda(),
        "bf16": False,
        "gradient_checkpointing": False,
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": task.batch_size,
        "num_train_epochs": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        **({"loss_type": "simpo"} if task.method == "simpo" else {}),
        **BOTH.get(task.method, {}),
        **(BEST.get(task.method, {}) if task.best else {}),
    }
    rows = [json.loads(line) for line in Path(task.rows).read_text(encoding="utf-8").splitlines()]
    options = _trl_model(task)
    trainer = Trainer(
        args=config_class(**settings),
        train_dataset=Dataset.from_list(rows),
        callbacks=[Callback()],
        **options,
    )
    same_adapters(trainer.model)
    trainer.get_train_dataloader()  # precomputes what there is to precompute
    pace.ready({key: value for key, value in trainer.args.to_dict().items() if "dir" not in key})
    trainer.train()


def _trl_classes(method: str) -> tuple[Any, Any]:
    if method == "simpo":
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        return CPOConfig, CPOTrainer
    import trl

    return getattr(trl, f"{_NAMES[method]}Config"), getattr(trl, f"{_NAMES[method]}Trainer")


def _trl_model(task: Task) -> dict[str, Any]:
    """The model, in the way that each trainer takes it, and the adapters to train."""
    options: dict[str, Any] = {"model": task.model}
    if task.method == "simpo":
        from transformers import AutoModelForCausalLM, AutoTokenizer

        options["model"] = AutoModelForCausalLM.from_pretrained(task.model, dtype="float32")
        options["processing_class"] = AutoTokenizer.from_pretrained(task.model)
    if task.lora:
        from peft import LoraConfig

        head = {"task_type": "SEQ_CLS", "modules_to_save": ["score"]} if task.method == "reward" else {}
        settings = {"r": LORA["lora_r"], "lora_alpha": LORA["lora_alpha"], "target_modules": TARGETS}
        options["peft_config"] = LoraConfig(**settings, **(head or {"task_type": "CAUSAL_LM"}))
    return options


def same_adapters(model: Any) -> None:
    """Give the adapters' random matrices values that depend on their place only."""
    import torch

    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            seed = zlib.crc32(name[name.index("layers.") : name.index(".lora_A")].encode())
            with torch.no_grad():
                values = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(seed))
                parameter.copy_((2 * values - 1) / parameter.shape[1] ** 0.5)


def _cuda() -> bool:
    return sys.modules["torch"].cuda.is_available()
