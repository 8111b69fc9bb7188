"""Resident memory of each process when a job's models are sharded, beside that of one process.

    python benchmarks/sharded_memory.py [--parameters 270] [--jobs dpo sft] [--modes fsdp] [--processes 2 4]
        [--output sharded_memory.json]

Makes a random Llama in fp32 safetensors, runs each job alone and on several processes under torchrun (gloo on
the CPU), and prints JSON: peak resident memory after loading (the reference included) and after two steps,
the largest of all processes, and its ratio to that of one process; what `--dry-run` estimates for both; and
the parameters of the trained model that a process holds after loading.  Memory is counted from what a process
has after the same job on a model of 1% of the size, and so without imports, thread pools and communication.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

STEPS = 2
ROWS = 8
"""Rows or completions of a step, on one process and on several."""
ZERO = {
    "stage": 3,
    "overlap_comm": False,
    "contiguous_gradients": True,
    "reduce_bucket_size": 10_000_000,
    "stage3_prefetch_bucket_size": 10_000_000,
    "sub_group_size": 20_000_000,
    "stage3_max_live_parameters": 20_000_000,
    "stage3_max_reuse_distance": 20_000_000,
    "stage3_param_persistence_threshold": 10_000,
}
"""DeepSpeed's buffers are of a fixed size; here they have that of a layer or two of this small model."""
SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo": {},
    "dpo_4bit": {"use_peft": True, "load_in_4bit": True},
    "reward": {},
    "grpo": {"beta": 0.1, "num_generations": 4, "max_completion_length": 16, "reward": ["length:target=8"]},
    "ppo": {"max_completion_length": 16, "reward": ["length:target=8"], "value_model": "separate"},
    "minmax": {
        "baseline": False,
        "force": True,
        "policy_model": {"max_new_tokens": 8},
        "monitor_model": {"max_new_tokens": 16},
        "training": {
            "batch_size": 4,
            "max_steps": STEPS,
            "monitor_warmup_steps": 0,
            "monitor_updates_per_policy": 1,
            "policy_updates": 1,
            "max_tokens_per_batch": 1024,
            "max_kv_tokens": 4096,
            "save_steps": None,
        },
    },
}


SETTINGS["minmax_full"] = SETTINGS["minmax"] | {
    **{each: SETTINGS["minmax"][each] | {"use_lora": False} for each in ("policy_model", "monitor_model")},
    "guards": {"rollback": False},
}
"""The game with both players trained in full, without guards, whose three copies two steps need not fill."""


def make_model(
    folder: Path, millions: int, hidden: int, vocabulary: int = 8_000, tied: bool = False
) -> dict[str, int]:
    """Write a Llama of about that size, and its tokenizer; parameters of it and of its largest part."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from rlhf_models import train_byte_tokenizer

    tokenizer: Any = train_byte_tokenizer(_texts(64))
    layer = 4 * hidden**2 + 3 * hidden * 4 * hidden
    layers = max(1, round((millions * 1e6 - (1 if tied else 2) * vocabulary * hidden) / layer))
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        vocab_size=vocabulary,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder, max_shard_size="300MB")
    tokenizer.save_pretrained(folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters, "largest_part": max(layer, vocabulary * hidden)}


def _texts(count: int, words: int = 12) -> list[str]:
    rng = random.Random(0)
    return [
        " ".join(rng.choice(("red", "green", "blue", "a", "of")) for _ in range(words)) for _ in range(count)
    ]


def write_rows(folder: Path, words: int = 12) -> None:
    """Write preference pairs and prompts to train on, with texts of the given number of words."""
    texts = _texts(3 * 64, words)
    pairs = [
        {"prompt": p, "chosen": f" {c}", "rejected": f" {r}"}
        for p, c, r in zip(texts[::3], texts[1::3], texts[2::3], strict=True)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    colours = ["red", "green", "blue"]
    stories = [
        {
            "story": f"{text}. It is {colours[i % 3]}.",
            "question": "Which?",
            "choices": colours,
            "answer": i % 3,
        }
        for i, text in enumerate(texts)
    ]
    (folder / "stories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in stories))


def write_inputs(folder: Path, options: argparse.Namespace) -> dict[str, int]:
    """Write models and rows; what `make_model` says of the large one."""
    write_rows(folder)
    make_model(folder / "small", options.parameters // 100, hidden=64)
    model = make_model(folder / "model", options.parameters, options.hidden)
    if any(job.startswith("minmax") for job in options.jobs):
        for size in ("model", "small"):
            make_scorers(folder / size)
    return model


def make_scorers(model: Path) -> None:
    """Write a reward model and a judge of the model's size beside it: its weights and a head."""
    from rlhf_models import JudgeModel, RewardModel, load_causal_lm, load_tokenizer

    tokenizer = load_tokenizer(str(model))
    for kind, name in ((RewardModel, "reward"), (JudgeModel, "judge")):
        scorer = kind.from_backbone(load_causal_lm(str(model)), tokenizer)
        scorer.save_pretrained(model.with_name(f"{model.name}-{name}"))


def work(name: str, folder: str, run: str, mode: str) -> None:
    """One process of one job, after one on a small model: what it measured, as a line of JSON."""
    import torch

    torch.set_num_threads(1)
    started = play if name.startswith("minmax") else train
    started(name, Path(folder, "small"), f"{run}-small", mode)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pin_libraries()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before = _peak()
    found = started(name, Path(folder, "model"), run, mode)
    for key in ("loaded", "stepped"):
        found[key] -= before
    print("MEASURED " + json.dumps(found), flush=True)


def train(name: str, model: Path, run: str, mode: str) -> dict[str, Any]:
    """Two steps of a job: the peaks of memory, parameters held, the loss of the last step."""
    from rlhf_algos import METHODS, Machine, Parallel, TrainingJob, plan_training
    from rlhf_algos.process_group import world_size
    from rlhf_data import RunFolder

    method_name = name.partition("_")[0]
    method = METHODS[method_name]
    values: dict[str, Any] = {
        "model_name_or_path": str(model),
        "train_data": str(model.with_name("pairs.jsonl")),
        "per_device_train_batch_size": ROWS // world_size(),
        "max_steps": STEPS,
        "learning_rate": 1e-5,
        "stage_samples": 0,
        "ref_kl_rows": 4,
        "save_steps": None,
        **SETTINGS[name],
    }
    config = method.resolve(values | sharding(run, mode))
    memory = plan_training(method_name, config, Machine(world_size()))["memory"]
    phases = {phase: round(sum(parts.values())) for phase, parts in memory.items()}
    planned = {"planned_load": phases["load"], "planned_peak": max(phases.values())}
    job = TrainingJob(method_name, config, RunFolder.create(run, resume=True))
    peaks: dict[str, int] = {}
    parallel: Any = Parallel
    prepare = parallel.prepare

    def recorded(*arguments: Any) -> Any:
        peaks["loaded"] = _peak()  # the models are in place, the optimizer has nothing yet
        return prepare(*arguments)

    parallel.prepare = recorded
    try:
        trainer, _ = job.prepare()
        trainer.prepare()
    finally:
        parallel.prepare = prepare
    held = numbers_held(trainer.model)
    trainer.checkpoints = None
    trainer.run = None
    size = trainer.global_batch_size  # of GRPO prompts, each with several completions
    for step in range(STEPS):
        metrics = trainer.train_step([trainer.examples[i] for i in range(step * size, (step + 1) * size)])
    return {**peaks, **planned, "stepped": _peak(), "held": held, "loss": metrics["loss"]}


def play(name: str, model: Path, run: str, mode: str) -> dict[str, Any]:
    """Two steps of the game with a reward model and a judge of the players' size; as `train`."""
    from rlhf_algos import Machine
    from rlhf_algos.process_group import world_size
    from rlhf_minmax import MinMaxConfig, MinMaxTrainer, build_game, load_stories, measure_scales
    from rlhf_minmax.run.dry_run import plan_run

    def part(kind: str) -> dict[str, str]:
        return {"model_name": f"{model}-{kind}" if kind else str(model)}

    own = SETTINGS[name]
    config = MinMaxConfig.from_dict(
        own
        | {
            "policy_model": own["policy_model"] | part(""),
            "monitor_model": own["monitor_model"] | part(""),
            "reward_model": part("reward"),
            "judge_model": part("judge"),
            "data": {"train_data": str(model.with_name("stories.jsonl")), "train_stories": 64},
            "training": own["training"] | sharding(run, mode),
        }
    )
    [memory] = plan_run(config, Machine(world_size()))["memory"].values()
    phases = {phase: round(sum(parts.values())) for phase, parts in memory.items()}
    stories = load_stories(config)
    pipeline = build_game(config, stories).pipeline
    found = {"loaded": _peak(), "planned_load": phases["load"], "planned_peak": max(phases.values())}
    pipeline, _ = measure_scales(pipeline, stories.train[:4], seed=config.seed)
    trainer = MinMaxTrainer(pipeline, config, stories.train)
    metrics = [trainer.train_step() for _ in range(STEPS)][-1]
    held = numbers_held(pipeline.players.policy.model)
    return {**found, "stepped": _peak(), "held": held, "loss": metrics["minmax/value"]}


def sharding(run: str, mode: str) -> dict[str, Any]:
    """Settings that shard a job's models."""
    if mode != "zero3":
        return {"fsdp": True} if mode == "fsdp" else {}
    path = Path(f"{run}.json")
    path.write_text(json.dumps({"zero_optimization": ZERO}))
    return {"deepspeed": str(path)}


def numbers_held(model: Any) -> int:
    """Of a model's parameters, how many this process holds."""
    from rlhf_models import is_sharded

    return sum(
        getattr(p, "ds_tensor", p.to_local() if is_sharded(p) and not hasattr(p, "ds_id") else p).numel()
        for p in model.parameters()
    )


def pin_libraries() -> None:
    """Keep the pages of libraries in memory, else the system drops and reads them as it likes."""
    lock = ctypes.CDLL(None, use_errno=True).mlock
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, *rest = line.split(maxsplit=5)
        if len(rest) == 4 and ".so" in rest[-1] and access[:2] == "r-":
            start, end = (int(each, 16) for each in addresses.split("-"))
            if lock(ctypes.c_void_p(start), ctypes.c_size_t(end - start)):
                raise OSError(ctypes.get_errno(), "libraries cannot be pinned; allow more locked memory")


def _peak() -> int:
    """Peak resident memory of this process, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("this system does not say how much memory a process took")


def measure(name: str, mode: str, processes: int, folder: Path) -> dict[str, Any]:
    """Run a job; the largest figures of its processes."""
    run = tempfile.mkdtemp(dir=folder)
    arguments = [__file__, "--work", name, str(folder), run, mode]
    start = [sys.executable]
    if processes > 1:
        torchrun = str(Path(sys.executable).with_name("torchrun"))
        start = [torchrun, "--standalone", "--nproc-per-node", str(processes)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run([*start, *arguments], env=env, capture_output=True, text=True, check=False)
    said = re.findall(r"MEASURED (\{.*?\})", done.stdout)  # processes may print into one line
    if len(said) != processes:
        raise SystemExit(f"{name} on {processes} processes ({mode}) failed: {done.stderr[-20000:]}")
    found = [json.loads(each) for each in said]
    return {key: max(each[key] for each in found) for key in found[0]}


def main() -> None:
    """Make the model, run every job, print what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, default=270, help="millions")
    parser.add_argument("--hidden", type=int, default=768, help="size of the model's hidden states")
    parser.add_argument("--jobs", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--modes", nargs="+", choices=["fsdp", "zero3"], default=["fsdp", "zero3"])
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--output", type=Path, help="where the JSON goes; printed if left out")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # In a process of its own, so that the models leave memory before anything is measured.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            model = pool.submit(write_inputs, folder, options).result()
        rows: list[dict[str, Any]] = []
        for job in options.jobs:
            alone = measure(job, "one", 1, folder)
            rows.append({"job": job, "mode": "one", "processes": 1, **alone})
            for mode in options.modes:
                for processes in options.processes:
                    found = measure(job, mode, processes, folder)
                    ratios = {
                        f"{key}_ratio": round(found[key] / alone[key], 3) for key in ("loaded", "stepped")
                    }
                    rows.append({"job": job, "mode": mode, "processes": processes, **found, **ratios})
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    report = json.dumps({**model, "rows": rows}, indent=1) + "\n"
    if options.output:
        options.output.write_text(report)
    else:
        print(report)


if __name__ == "__main__":
    main()
