"""DPO and GRPO updates on fixed rows: this toolkit against TRL, on one GPU (or, tiny, on a CPU).

    python benchmarks/gpu/update_step.py --shapes 0.5b 1.5b --output benchmarks/results/gpu/update_step.json
    python benchmarks/gpu/update_step.py --shapes 7b --prompts 1024 --groups 8 --checkpointing
    python benchmarks/gpu/update_step.py --quick

Models are Qwen2.5's shapes with random weights, so that nothing is downloaded.  GRPO's completions are given:
what is timed is everything from them to the new weights.  The sides are `ours`, `trl` (its trainers: DPO with
precomputed reference log-probs, GRPO on passes of `--rows-per-pass` rows) and `trl-trees` (the prefix trees
of TRL's AsyncGRPO with its loss, which need a FlashAttention 3 kernel).  Each runs in a process of its own,
in turns.  Prints JSON: median seconds of a step, tokens of all rows per second, tokens that went through the
model, MFU (6 FLOPs per parameter and such token, attention left out), peak memory, and whether losses and
gradient norms of the first step agree with ours.  A side that cannot run says why.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from update_sides import RUN, Task, Unavailable

HERE = Path(__file__).resolve()
SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {
        "hidden": 896,
        "layers": 24,
        "heads": 14,
        "kv": 2,
        "inner": 4864,
        "vocab": 151_936,
        "tied": True,
    },
    "1.5b": {
        "hidden": 1536,
        "layers": 28,
        "heads": 12,
        "kv": 2,
        "inner": 8960,
        "vocab": 151_936,
        "tied": True,
    },
    "7b": {
        "hidden": 3584,
        "layers": 28,
        "heads": 28,
        "kv": 4,
        "inner": 18_944,
        "vocab": 152_064,
        "tied": False,
    },
    "tiny": {"hidden": 64, "layers": 2, "heads": 4, "kv": 2, "inner": 128, "vocab": 1_000, "tied": True},
}
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
"""Dense bf16, as the maker states it."""
SIDES = {"dpo": ("ours", "trl"), "grpo": ("ours", "trl", "trl-trees")}
WARM_UP = 2
TOLERANCE = {"cuda": 2e-2, "cpu": 1e-4}
"""Relative, of losses and gradient norms: bf16 on the GPU, fp32 on the CPU."""


def make_model(folder: Path, shape: dict[str, Any], positions: int) -> int:
    """Write a model with random weights in bf16, and a tokenizer of a word a token; its parameters."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = {f"w{i}": i for i in range(998)} | {"<pad>": 998, "<eos>": 999}
    words_of = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    words_of.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words_of, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        max_position_embeddings=positions,
        tie_word_embeddings=shape["hidden"] < 2000,
        pad_token_id=998,
        eos_token_id=999,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    del model  # the sides need the memory
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return parameters


def write_rows(path: Path, *, count: int, prompt: int, group: int, new_tokens: int) -> int:
    """Write random prompts with random completions of different lengths; tokens of a prompt's sequences."""
    rng = random.Random(0)
    lengths = [new_tokens - i * new_tokens // (2 * group) for i in range(group)]
    rows = [
        {
            "prompt": [rng.randrange(998) for _ in range(prompt)],
            "completions": [[rng.randrange(998) for _ in range(length - 1)] + [999] for length in lengths],
        }
        for _ in range(count)
    ]
    path.write_text(json.dumps(rows))
    return sum(prompt + length for length in lengths)


def device_facts() -> dict[str, Any]:
    """Of this process: its device, and the peak of its memory."""
    import torch

    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        return {"device": name, "memory_mb": round(torch.cuda.max_memory_allocated() / 1e6)}
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return {"device": "CPU", "memory_mb": round(int(peak.split()[1]) * 1024 / 1e6)}


def work(task: Task) -> None:
    """A side's process: trains, and prints what it measured as a line of JSON."""
    import torch

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.manual_seed(0)
    found: dict[str, Any]
    try:
        steps = RUN[task.method, task.side](task)
    except torch.OutOfMemoryError as error:
        found = {"cannot": f"out of memory: {str(error).splitlines()[0]}"}
    except Unavailable as error:
        found = {"cannot": str(error)}
    else:
        found = {"steps": steps, **device_facts()}
    print(json.dumps(found), file=out, flush=True)


def measure(task: Task) -> dict[str, Any]:
    """Run a side."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TQDM_DISABLE": "1"}
    command = [sys.executable, str(HERE), "--work", json.dumps(asdict(task))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{task.method} of {task.side} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def summary(runs: list[dict[str, Any]], *, parameters: int, tokens: int) -> dict[str, Any]:
    """Of the runs of a side.

    Args:
        runs: what `measure` gave.
        parameters: of the model.
        tokens: of all sequences of a step.
    """
    if "cannot" in runs[0]:
        return runs[0]
    steps = [step for run in runs for step in run["steps"][WARM_UP:]]
    seconds = statistics.median(step["seconds"] for step in steps)
    passed = statistics.median(step["tokens"] for step in steps)
    peak = next((flops for card, flops in PEAK_FLOPS.items() if card in runs[0]["device"]), None)
    return {
        "device": runs[0]["device"],
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_through_the_model": passed,
        "mfu": None if peak is None else 6 * parameters * passed / seconds / peak,
        "memory_mb": max(run["memory_mb"] for run in runs),
        "losses": [step["loss"] for step in runs[0]["steps"]],
        "grad_norms": [step["grad_norm"] for step in runs[0]["steps"]],
    }


def compare(base: Callable[[str], Task], sides: list[str], repeats: int, **counts: int) -> dict[str, Any]:
    """Sides of a method in turns, and their ratios to ours."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for turn in range(repeats):
        for side in sorted(runs, reverse=bool(turn % 2)):
            if not runs[side] or "cannot" not in runs[side][0]:
                runs[side].append(measure(base(side)))
    measured = {side: summary(each, **counts) for side, each in runs.items()}
    ours = measured["ours"]
    for side, found in measured.items():
        if side == "ours" or "cannot" in found or "cannot" in ours:
            continue
        tolerance = TOLERANCE["cpu" if found["device"] == "CPU" else "cuda"]
        pairs = [(found[name][0], ours[name][0]) for name in ("losses", "grad_norms")]
        found["same"] = all(abs(a - b) <= tolerance * max(abs(b), 1e-2) for a, b in pairs)
        found["speedup"] = found["seconds"] / ours["seconds"]
        found["memory_ratio"] = ours["memory_mb"] / found["memory_mb"]
    return measured


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["0.5b"])
    parser.add_argument("--methods", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument(
        "--prompts", nargs="+", type=int, default=[256, 1024, 4096], help="tokens of a prompt"
    )
    parser.add_argument("--groups", nargs="+", type=int, default=[4, 8, 16], help="completions of a prompt")
    parser.add_argument("--new-tokens", type=int, default=256, help="of the longest completion")
    parser.add_argument("--prompts-per-step", type=int, default=4)
    parser.add_argument("--rows-per-pass", type=int, default=8, help="that TRL takes at a time")
    parser.add_argument("--tokens-per-pass", type=int, default=16_384, help="that a tree has at most")
    parser.add_argument("--checkpointing", action="store_true", help="compute activations twice")
    parser.add_argument("--optim", help="optimizer of both sides, adamw_bnb_8bit for example")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--sides", nargs="+", choices=SIDES["grpo"], default=list(SIDES["grpo"]))
    parser.add_argument("--commit", help="where the files are a copy without their history")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.shapes, options.prompts, options.groups = ["tiny"], [24], [4]
        options.new_tokens, options.steps, options.repeats = 16, 3, 1
    return options


def described_commit() -> str:
    """Of this checkout."""
    command = ["git", "-C", str(HERE.parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def cases(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Methods with their completions of a prompt."""
    groups = {"dpo": [2], "grpo": options.groups}
    return [(method, group) for method in options.methods for group in groups[method]]


def measured_row(
    options: argparse.Namespace, folder: Path, case: tuple[str, int, str, int], parameters: int
) -> dict[str, Any]:
    """All sides on the rows of a case: shape, tokens of a prompt, method and completions of a prompt.

    Args:
        options: those of the command.
        folder: with the model.
        case: see above.
        parameters: of the model.
    """
    shape, prompt, method, group = case
    per_step, new_tokens = options.prompts_per_step, options.new_tokens
    sizes = {"prompt": prompt, "group": group, "new_tokens": new_tokens}
    tokens = per_step * write_rows(folder / "rows.json", count=per_step * options.steps, **sizes)
    own = (options.rows_per_pass, options.tokens_per_pass, options.checkpointing, options.optim)

    def task(side: str) -> Task:
        return Task(str(folder), method, side, group, options.steps, per_step, new_tokens, *own)

    sides = [side for side in SIDES[method] if side in {"ours", *options.sides}]
    found = compare(task, sides, options.repeats, parameters=parameters, tokens=tokens)
    row = {"method": method, "shape": shape, "prompt": prompt, "group": group, "tokens": tokens}
    return row | found


def main() -> None:
    """Make models and rows, run every side, print what was measured."""
    options = parse()
    if options.work:
        work(Task(**json.loads(options.work)))
        return
    commit = options.commit or described_commit()
    report: dict[str, Any] = {"benchmark": "update_step", "commit": commit, "rows": []}
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            positions = max(options.prompts) + options.new_tokens + 8
            parameters = make_model(folder / "model", SHAPES[shape], positions)
            for prompt, (method, group) in itertools.product(options.prompts, cases(options)):
                row = measured_row(options, folder, (shape, prompt, method, group), parameters)
                report["rows"].append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
                if options.output:
                    options.output.parent.mkdir(parents=True, exist_ok=True)
                    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
