"""TRL's DPOTrainer with and without `share_prefixes`: the same rows and steps; time, tokens and losses.

Both trainers train in one process, a step each in turn, so that a busy machine slows both. Prints JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from offline_vs_trl import HH_DATA, SHAPES, read_pairs, write_models

from rlhf_data import atomic_write_json

SIDES = ("padded", "shared")


def make_trainer(
    model: Any, reference: Any, tokenizer: Any, pairs: list[Any], args: argparse.Namespace
) -> Any:
    """TRL's trainer with its defaults, in fp32 and without gradient checkpointing."""
    from datasets import Dataset
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    config = DPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=args.batch_size,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=0,
    )
    rows = Dataset.from_list(pairs)
    return DPOTrainer(model, ref_model=reference, args=config, train_dataset=rows, processing_class=tokenizer)


def run(folder: Path, pairs: list[Any], args: argparse.Namespace) -> dict[str, Any]:
    """Train both for some steps and measure them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rlhf_models import share_prefixes

    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    start = AutoModelForCausalLM.from_pretrained(folder / "policy")
    sides: dict[str, Any] = {}
    wraps: tuple[Any, Any] = (lambda model: model, share_prefixes)
    for side, wrap in zip(SIDES, wraps, strict=True):
        policy, reference = wrap(copy.deepcopy(start)), wrap(copy.deepcopy(start))
        trainer = make_trainer(policy, reference, tokenizer, pairs, args)
        seen: list[int] = []
        trainer.model.get_input_embeddings().register_forward_hook(
            lambda _, inputs, __, seen=seen: seen.append(inputs[0].numel())
        )
        optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-5)
        sides[side] = {
            "trainer": trainer,
            "optimizer": optimizer,
            "tokens": seen,
            "seconds": [],
            "losses": [],
        }
        sides[side]["batches"] = iter(trainer.get_train_dataloader())
    for step in range(args.steps + 1):  # the first one is not measured
        for side in SIDES if step % 2 else SIDES[::-1]:
            each = sides[side]
            inputs = next(each["batches"])
            begin = time.perf_counter()
            loss = each["trainer"].compute_loss(each["trainer"].model.train(), inputs)
            loss.backward()
            each["optimizer"].step()
            each["optimizer"].zero_grad()
            each["seconds"].append(time.perf_counter() - begin)
            each["losses"].append(loss.item())
    padded, shared = (sides[side] for side in SIDES)
    differences = [abs(a - b) for a, b in zip(padded["losses"], shared["losses"], strict=True)]
    medians = {side: statistics.median(sides[side]["seconds"][1:]) for side in SIDES}
    return {
        "shape": args.shape,
        "batch_size": args.batch_size,
        "steps": args.steps,
        "median_seconds": medians,
        "speedup": statistics.median(
            a / b for a, b in zip(padded["seconds"][1:], shared["seconds"][1:], strict=True)
        ),
        "tokens_padded_over_shared": sum(padded["tokens"]) / sum(shared["tokens"]),
        "largest_loss_difference": max(differences),
    }


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="9M")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    pairs = read_pairs(HH_DATA if HH_DATA.exists() else None, (args.steps + 1) * args.batch_size)
    with tempfile.TemporaryDirectory() as name:
        writer = get_context("spawn").Process(target=write_models, args=(Path(name), args.shape, pairs))
        writer.start()
        writer.join()
        result = run(Path(name), pairs, args)
    result["versions"] = {name: version(name) for name in ("torch", "transformers", "trl")}
    print(json.dumps(result, indent=2))
    if args.output:
        atomic_write_json(args.output, result)


if __name__ == "__main__":
    main()
