"""The k-th largest magnitude of a stream, against a sort of the whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rlhf_merge.methods.sparsify import largest_magnitudes

NUMBERS = 1000


def _values(kind: str, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(len(kind))
    normal = torch.randn(NUMBERS, generator=generator, dtype=dtype).abs()
    smallest = torch.finfo(dtype).smallest_normal
    return {
        "random": normal,
        "few values": normal.mul(2).round().div(2),
        "bfloat16 differences": normal.bfloat16().to(dtype),
        "one bit apart": 1
        + torch.randint(0, 9, (NUMBERS,), generator=generator).to(dtype) * torch.finfo(dtype).eps,
        "denormal": normal * smallest / 1024,
        "all equal": torch.full((NUMBERS,), 0.3, dtype=dtype),
        "all zero": torch.zeros(NUMBERS, dtype=dtype),
        "mostly zero": normal * (torch.rand(NUMBERS, generator=generator) < 0.1),
        "every size": normal * 10.0 ** torch.randint(-30, 30, (NUMBERS,), generator=generator),
        "largest": torch.full((NUMBERS,), torch.finfo(dtype).max, dtype=dtype).div_(
            torch.randint(1, 5, (NUMBERS,), generator=generator)
        ),
    }[kind]


KINDS = ("random", "few values", "bfloat16 differences", "one bit apart", "denormal")
KINDS += ("all equal", "all zero", "mostly zero", "every size", "largest")


def _blocks(*tensors: Tensor, size: int = 64) -> Iterator[tuple[int, Tensor]]:
    for index, tensor in enumerate(tensors):
        for start in range(0, len(tensor), size):
            yield index, tensor[start : start + size].clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_is_the_element_that_a_sort_puts_there(kind: str, dtype: torch.dtype):
    values = _values(kind, dtype)
    ordered = values.sort(descending=True).values.tolist()
    ranks = [1, 2, 500, 499, 999, 1000, 37]
    found = largest_magnitudes(lambda: _blocks(values), [ranks], dtype)
    assert found == [[ordered[rank - 1] for rank in ranks]]


def test_several_tensors_of_other_sizes_and_ranks():
    tensors = [_values(kind, torch.float32)[: 100 * (i + 1)] for i, kind in enumerate(KINDS)]
    ranks = [[i + 1, 50] if i % 3 else [] for i in range(len(tensors))]
    found = largest_magnitudes(lambda: _blocks(*tensors), ranks)
    for tensor, wanted, magnitudes in zip(tensors, ranks, found, strict=True):
        ordered = tensor.sort(descending=True).values.tolist()
        assert magnitudes == [ordered[rank - 1] for rank in wanted]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_single_element(dtype: torch.dtype):
    value = torch.tensor([0.1], dtype=dtype)
    assert largest_magnitudes(lambda: [(0, value)], [[1]], dtype) == [[float(value)]]


@pytest.mark.parametrize(("dtype", "passes"), [(torch.float32, 2), (torch.float64, 4)])
def test_streams_as_often_as_it_says(dtype: torch.dtype, passes: int):
    streamed = []

    def blocks() -> Iterator[tuple[int, Tensor]]:
        streamed.append(1)
        yield from _blocks(_values("random", dtype))

    largest_magnitudes(blocks, [[10, 900]], dtype)
    assert len(streamed) == passes


def test_the_cut_does_not_matter_and_blocks_may_be_overwritten():
    values = _values("every size", torch.float32)

    def reused(size: int) -> Iterator[tuple[int, Tensor]]:
        buffer = torch.empty(size)
        for start in range(0, NUMBERS, size):
            piece = values[start : start + size]
            yield 0, buffer[: len(piece)].copy_(piece)

    found = [largest_magnitudes(lambda size=size: reused(size), [[123]]) for size in (1, 7, 1000)]
    assert found[0] == found[1] == found[2] == [[float(values.sort(descending=True).values[122])]]
