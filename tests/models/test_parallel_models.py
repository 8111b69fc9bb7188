"""Every kind of model with a head gives two processes the gradient that one has."""

import pytest

pytestmark = pytest.mark.slow

COMPARE = """
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rlhf_data import TokenSequence, pack
from rlhf_models import (
    LoraSettings, RewardEnsemble, RewardModel, ValueModel, tiny_model, train_byte_tokenizer
)
from rlhf_models.kernels.compile import decoder_layers

ROWS = [[5, 9, 14, 3, 27], [5, 9, 14, 60], [7, 7, 8], [9, 9]]
LORA = LoraSettings(lora_r=2)
tokenizer = train_byte_tokenizer(["where is mary ?"], vocab_size=262)
base = tiny_model("llama", vocab_size=262, initializer_range=0.1)


def ensemble(kind, **options):
    return RewardEnsemble.from_backbone(base, tokenizer, size=2, kind=kind, **options)


MODELS = {
    "reward": lambda: RewardModel.from_backbone(base, tokenizer),
    "mlp": lambda: RewardModel.from_backbone(base, tokenizer, head="mlp"),
    "lora": lambda: RewardModel.from_backbone(base, tokenizer).add_lora(LORA),
    "value": lambda: ValueModel.from_backbone(base, tokenizer),
    "independent": lambda: ensemble("independent"),
    "adapters": lambda: ensemble("adapters", lora=LORA),
    "heads": lambda: ensemble("heads"),
}


def loss(module, rows):
    (batch,) = pack([TokenSequence(row, 1) for row in rows])
    return module(batch).square().sum()


def gradients(model):
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}


def sharded(model):
    for layer in decoder_layers(model):
        fully_shard(layer)
    return fully_shard(model)


dist.init_process_group("gloo", timeout=timedelta(minutes=10))
part = ROWS[2 * dist.get_rank() :][:2]
for name, make in MODELS.items():
    one = make().train()
    loss(one, ROWS).backward()
    expected = gradients(one)
    for wrap in (DistributedDataParallel, sharded):
        model = make().train()
        wrapped = wrap(model)
        for _ in range(2):  # a second pass, for wrappers learn from the first
            wrapped.zero_grad()
            loss(wrapped, part).backward()
        found = gradients(model)
        assert found.keys() == expected.keys(), (name, wrap)
        for key, gradient in expected.items():  # wrappers average over the two processes
            atol = 1e-6 * max(1, gradient.abs().max().item())  # sums of large terms may be near zero
            torch.testing.assert_close(2 * found[key], gradient, rtol=1e-4, atol=atol)
    if dist.get_rank() == 0:
        print("same", name)
dist.destroy_process_group()
"""


def test_two_processes_have_the_gradient_of_one(run_processes, tmp_path):
    (tmp_path / "compare.py").write_text(COMPARE)
    assert run_processes([tmp_path / "compare.py"]).count("same") == 7
