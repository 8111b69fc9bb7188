"""The flash kernels on a GPU against blocks in fp64 on the CPU."""

from __future__ import annotations

import pytest
import torch

from rlhf_data import PackedBatch, TokenSequence, pack
from rlhf_models.attention.packed import TreeAttention
from rlhf_models.attention.tree import AttentionOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def tree_of_three_levels() -> PackedBatch:
    """Prefixes of 40 tokens, each with two of 17, each with three ends of 1, 9 and 30 tokens."""
    ids = iter(range(100_000))

    def some(count: int) -> list[int]:
        return [next(ids) for _ in range(count)]

    sequences = [
        TokenSequence(start + middle + some(length), 1)
        for start in (some(40), some(40))
        for middle in (some(17), some(17))
        for length in (1, 9, 30)
    ]
    (batch,) = pack(sequences)
    return batch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 5, 48])
@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 4, 8), (4, 2, 64), (6, 1, 128), (2, 2, 12)])
def test_outputs_and_gradients_are_those_of_blocks(
    dtype: torch.dtype, window: int | None, heads: int, groups: int, size: int
) -> None:
    """Flash kernels need a head dimension divisible by 8; with 12 the dense blocks are used."""
    batch = tree_of_three_levels()
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch.num_tokens, count, size) for count in (heads, groups, groups, heads)]
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    options = AttentionOptions(size**-0.5, window=window)

    def run(batch: PackedBatch, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        query, key, value, weight = (x.to(device, dtype).requires_grad_() for x in tensors)
        output = TreeAttention(batch).attend(0, query, key, value, options)
        found = torch.autograd.grad((output * weight.detach()).sum(), (query, key, value))
        return [x.detach().cpu().double() for x in (output, *found)]

    exact = run(batch, "cpu", torch.float64)
    for got, wanted in zip(run(batch.to("cuda"), "cuda", dtype), exact, strict=True):
        assert (got - wanted).norm() < 1e-2 * wanted.norm()
