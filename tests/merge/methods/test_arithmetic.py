"""What is kept of a task vector: random masks, the largest elements, and what is between two bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from proofs import by_default
from rlhf_merge.methods.arithmetic import (
    LEVELS,
    MaskBits,
    Sparsify,
    kept_count,
    largest_magnitudes,
    random_drop,
    rank_drop,
    row_ranks,
    share_count,
    trim,
)
from rlhf_merge.methods.blocks import Workspace

both_types = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def applied(sparsify: Sparsify, delta: Tensor, *cuts: int) -> Tensor:
    """A copy of a task vector, made sparse in pieces."""
    pieces = torch.tensor_split(delta.clone(), list(cuts))
    for piece in pieces:
        sparsify(piece, Workspace(delta.dtype))
    return torch.cat(pieces)


@both_types
def test_trim_keeps_its_bounds_and_what_is_between_them(dtype: torch.dtype):
    low, high = torch.tensor([0.1, 0.7], dtype=dtype).tolist()
    delta = torch.tensor([0.1, -0.1, 0.7, -0.7, 0.3, 0.0], dtype=dtype)
    assert torch.equal(applied(trim(low, high), delta), delta)
    inside = torch.nextafter(delta, torch.zeros(1, dtype=dtype))
    assert applied(trim(low), inside)[:4].tolist() == [0, 0, *inside[2:4].tolist()]
    outside = torch.nextafter(delta, delta.sign() * math.inf)
    assert applied(trim(low, high), outside)[:4].tolist() == [*outside[:2].tolist(), 0, 0]


def test_trim_of_nothing():
    delta = torch.tensor([1e-45, -1e-45, 0.0, 3e38])
    assert torch.equal(applied(trim(0.0), delta), delta)
    assert torch.equal(applied(trim(1e-45), delta), delta)
    assert torch.equal(applied(trim(0.0, 0.0), delta), torch.zeros(4))


@pytest.mark.parametrize("density", [0.9, 0.5, 0.001, 1e-9, 1.4 / 65536])
def test_random_drop_keeps_or_drops_and_rescales(density: float):
    delta = torch.randn(5000, generator=torch.Generator().manual_seed(0)) + 5
    plain = applied(random_drop(MaskBits(0, "w", 0), density, rescale=False), delta)
    kept = plain != 0
    assert torch.equal(plain, delta * kept)
    scale = LEVELS / max(1, round(density * LEVELS))
    scaled = applied(random_drop(MaskBits(0, "w", 0), density, rescale=True), delta)
    assert torch.equal(scaled, delta * kept * scale)


def test_random_drop_does_not_depend_on_the_cut():
    delta = torch.ones(1000)
    whole = applied(random_drop(MaskBits(0, "w", 0), 0.5, True), delta)
    assert torch.equal(whole, applied(random_drop(MaskBits(0, "w", 0), 0.5, True), delta, 1, 7, 7, 600))
    assert not torch.equal(whole, applied(random_drop(MaskBits(0, "w", 1), 0.5, True), delta))


def test_rank_drop_does_not_depend_on_the_cut_between_rows():
    delta = torch.randn(60 * 7, generator=torch.Generator().manual_seed(0))

    def drop() -> Sparsify:
        return rank_drop(MaskBits(0, "w", 0), 0.5, 0.2, True, 7)

    assert torch.equal(applied(drop(), delta), applied(drop(), delta, 7, 70, 77))


def test_rank_drop_of_hardly_any_probability_stays_finite():
    # The smallest element of a row has 1e-9, which is rounded up to 1/65536 and not down to nothing.
    rows = torch.arange(1.0, 401.0).repeat(50)
    dropped = applied(rank_drop(MaskBits(0, "w", 0), 0.1, 0.1 - 1e-9, True, 400), rows)
    assert bool(torch.isfinite(dropped).all()) and 0.09 < float((dropped != 0).double().mean()) < 0.11


@both_types
def test_row_ranks(dtype: torch.dtype):
    # The second row has equal elements: the first of them comes first.
    rows = torch.tensor([[3.0, 1.0, 0.0, 2.0], [0.5, 1.0, 0.5, 0.5]], dtype=dtype)
    assert row_ranks(rows).tolist() == [[3, 1, 0, 2], [0, 3, 1, 2]]
    many = torch.randn(50, 33, generator=torch.Generator().manual_seed(0), dtype=dtype).abs()
    for values in (many, (many * 8).round() / 8):
        expected = values.sort(dim=1, stable=True).indices.argsort(dim=1)
        assert torch.equal(row_ranks(values), expected)


@pytest.mark.parametrize(
    ("density", "numel", "kept"),
    [
        (0.5, 5, 2),
        (0.29, 100, 29),  # 0.29·100 is 28.999999999999996 in floating point
        (2 / 3, 3, 2),
        (1 - 2 / 3, 3, 1),
        (0.1 + 0.2, 10, 3),
        (0.1, 10**9 + 9, 10**8),
        (1e-9, 100, 1),
        (1.0, 7, 7),
        (0.5, 0, 0),
    ],
)
def test_kept_count(density: float, numel: int, kept: int):
    assert kept_count(density, numel) == kept


def test_share_count_may_be_none():
    assert [share_count(share, 100) for share in (0.0, 0.009, 0.01, 0.999, 1.0)] == [0, 0, 1, 99, 100]


NUMBERS = 1000


def values_of(kind: str, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(len(kind))
    normal = torch.randn(NUMBERS, generator=generator, dtype=dtype).abs()
    some, limits = torch.randint(0, 9, (NUMBERS,), generator=generator).to(dtype), torch.finfo(dtype)
    return {
        "random": normal,
        "few values": normal.mul(2).round().div(2),
        "bfloat16 differences": normal.bfloat16().to(dtype),
        "one bit apart": 1 + some * limits.eps,
        "denormal": normal * limits.smallest_normal / 1024,
        "all equal": torch.full((NUMBERS,), 0.3, dtype=dtype),
        "all zero": torch.zeros(NUMBERS, dtype=dtype),
        "mostly zero": normal * (some == 0),
        "every size": normal * 10.0 ** (7 * some - 30),
        "largest": torch.full((NUMBERS,), limits.max, dtype=dtype).div_(1 + some),
    }[kind]


KINDS = ("random", "few values", "bfloat16 differences", "one bit apart", "denormal")
KINDS += ("all equal", "all zero", "mostly zero", "every size", "largest")


def in_blocks(*tensors: Tensor, size: int = 64) -> Iterator[tuple[int, Tensor]]:
    """Pieces of tensors, in a buffer that is overwritten."""
    buffer = torch.empty(size, dtype=tensors[0].dtype)
    for index, tensor in enumerate(tensors):
        for start in range(0, len(tensor), size):
            piece = tensor[start : start + size]
            yield index, buffer[: len(piece)].copy_(piece)


@both_types
@pytest.mark.parametrize("kind", by_default(KINDS, "random", "denormal", "all equal"))
def test_the_kth_largest_is_the_element_that_a_sort_puts_there(kind: str, dtype: torch.dtype):
    values = values_of(kind, dtype)
    ordered = values.sort(descending=True).values.tolist()
    ranks = [1, 2, 500, 499, 999, 1000, 37]
    for size in (7, 64, 1000):
        found = largest_magnitudes(lambda size=size: in_blocks(values, size=size), [ranks], dtype)
        assert found == [[ordered[rank - 1] for rank in ranks]]
    assert largest_magnitudes(lambda: [(0, values[:1])], [[1]], dtype) == [[float(values[0])]]


def test_several_tensors_of_other_sizes_and_ranks():
    tensors = [values_of(kind, torch.float32)[: 100 * (i + 1)] for i, kind in enumerate(KINDS)]
    ranks = [[i + 1, 50] if i % 3 else [] for i in range(len(tensors))]
    found = largest_magnitudes(lambda: in_blocks(*tensors), ranks)
    for tensor, wanted, magnitudes in zip(tensors, ranks, found, strict=True):
        ordered = tensor.sort(descending=True).values.tolist()
        assert magnitudes == [ordered[rank - 1] for rank in wanted]


@pytest.mark.parametrize(("dtype", "passes"), [(torch.float32, 2), (torch.float64, 4)])
def test_streams_as_often_as_it_says(dtype: torch.dtype, passes: int):
    streamed = []

    def blocks() -> Iterator[tuple[int, Tensor]]:
        streamed.append(1)
        yield from in_blocks(values_of("random", dtype))

    largest_magnitudes(blocks, [[10, 900]], dtype)
    assert len(streamed) == passes


def draw(bits: MaskBits, *sizes: int) -> Tensor:
    return torch.cat([bits.take(torch.empty(size)) for size in sizes])


def test_the_same_for_the_same_seed_name_and_model():
    whole = draw(MaskBits(3, "layers.0.w", 1), 1000)
    assert torch.equal(whole, draw(MaskBits(3, "layers.0.w", 1), 1000))
    for other in (MaskBits(4, "layers.0.w", 1), MaskBits(3, "layers.1.w", 1), MaskBits(3, "layers.0.w", 0)):
        assert int((draw(other, 1000) == whole).sum()) < 5


def test_the_first_numbers():
    # As they were when this was written: recipes promise to make the same bytes again.
    assert draw(MaskBits(0, "", 0), 6).tolist() == [49518, 26535, 42758, 55890, 28959, 52360]


@pytest.mark.parametrize("sizes", [(1,) * 50, (3, 47), (4, 4, 42), (0, 49, 1), (13, 0, 37)])
def test_the_cut_does_not_matter(sizes: tuple[int, ...]):
    assert torch.equal(draw(MaskBits(1, "w", 0), *sizes), draw(MaskBits(1, "w", 0), 50))


@both_types
def test_whole_numbers_evenly_spread(dtype: torch.dtype):
    numbers = MaskBits(5, "w", 0).take(torch.empty(200_000, dtype=dtype))
    assert numbers.dtype == dtype and torch.equal(numbers, numbers.round())
    assert 0 <= float(numbers.min()) < 10 and LEVELS - 10 < float(numbers.max()) <= LEVELS - 1
    counts = torch.histc(numbers.double(), 16, 0, LEVELS)
    # Chi-squared with 15 degrees of freedom is below 50 in all but one of 100,000 draws.
    expected = len(numbers) / 16
    assert float(((counts - expected) ** 2 / expected).sum()) < 50
