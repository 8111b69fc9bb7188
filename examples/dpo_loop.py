"""DPO as one loop on the public API: rows, packed prefix trees, log-probs, loss, step.

`uv run examples/dpo_loop.py` trains a tiny model in seconds on a CPU; `--train-data pairs.jsonl` reads rows
with `prompt`, `chosen` and `rejected`. A pair's prompt is stored and computed once, for both completions;
there is no padding.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import click
import torch
from torch import Tensor, nn

from rlhf_algos import create_optimizer
from rlhf_algos.losses import dpo_loss
from rlhf_data import PackedBatch, PreferenceDataset, PreferencePair, PreferenceRecord, load_records, pack
from rlhf_models import build_tiny_llama, prepare_for_packing, token_logps, train_byte_tokenizer

BETA = 0.1


def pack_pairs(pairs: Sequence[PreferencePair]) -> PackedBatch:
    """Chosen and rejected completions in turn, as one tree: what they share from the start is stored once."""
    [batch] = pack([sequence for pair in pairs for sequence in (pair.chosen, pair.rejected)])
    return batch


def sequence_logps(model: nn.Module, batch: PackedBatch) -> Tensor:
    """(P, 2) log-probabilities of chosen and rejected completions, summed over their tokens."""
    logps = token_logps(model, batch).logps  # (M,) of all scored tokens
    sums = logps.new_zeros(batch.num_sequences).index_add(0, batch.score_sequence, logps)  # (2P,)
    return sums.view(-1, 2)


@torch.no_grad()
def accuracy(model: nn.Module, reference: nn.Module, batch: PackedBatch) -> float:
    """Share of pairs whose chosen completion gained more than the rejected one."""
    gain = sequence_logps(model, batch) - sequence_logps(reference, batch)  # (P, 2)
    return (gain[:, 0] > gain[:, 1]).float().mean().item()


def made_up_rows(count: int) -> list[PreferenceRecord]:
    """Rows whose chosen answer is polite."""
    draw = random.Random(1)
    rows = []
    for _ in range(count):
        thing, place = (
            draw.choice(("ball", "lamp", "coat", "key")),
            draw.choice(("shed", "garden", "kitchen")),
        )
        answer = f"it is in the {place}"
        rows.append(
            PreferenceRecord(f"where is the {thing} ?", f" {answer} , dear friend", f" {answer} , you fool")
        )
    return rows


@click.command()
@click.option("--train-data", help="A file of preference pairs.  [default: made-up rows]")
@click.option("--steps", default=20, show_default=True)
@click.option("--pairs-per-step", default=16, show_default=True)
def main(train_data: str | None, steps: int, pairs_per_step: int) -> None:
    """Train a tiny model on preference pairs, every eighth of which is held out."""
    records = load_records(train_data, "preference").records if train_data else made_up_rows(256)
    tokenizer: Any = train_byte_tokenizer(
        [f"{record.prompt}{record.chosen}{record.rejected}" for record in records]
    )
    train = PreferenceDataset([record for i, record in enumerate(records) if i % 8], tokenizer)
    held_out = PreferenceDataset(records[::8], tokenizer)
    model = prepare_for_packing(build_tiny_llama(len(tokenizer), eos_token_id=tokenizer.eos_token_id))
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = create_optimizer(model.parameters(), learning_rate=1e-3)
    held_out_batch = pack_pairs(list(held_out))

    draw = random.Random(0)
    for step in range(1, steps + 1):
        batch = pack_pairs([train[i] for i in draw.sample(range(len(train)), pairs_per_step)])
        with torch.no_grad():
            ref_logps = sequence_logps(reference, batch)  # (P, 2)
        logps = sequence_logps(model, batch)  # (P, 2)
        result = dpo_loss(*logps.unbind(1), *ref_logps.unbind(1), beta=BETA)
        loss = result.loss / pairs_per_step  # losses are sums: the caller divides once
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step == 1 or step % 5 == 0:
            held = accuracy(model, reference, held_out_batch)
            click.echo(f"step {step:3}  loss {loss.item():.4f}  held-out accuracy {held:.2f}")


if __name__ == "__main__":
    main()
