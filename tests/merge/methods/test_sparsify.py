"""What is kept of a task vector."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rlhf_merge.methods.blocks import Workspace
from rlhf_merge.methods.sparsify import (
    LEVELS,
    MaskBits,
    RandomDrop,
    RankDrop,
    Sparsifier,
    Trim,
    kept_count,
    row_ranks,
    share_count,
)

SPACE = Workspace()


def applied(sparsifier: Sparsifier, delta: Tensor, *cuts: int) -> Tensor:
    """A copy of a task vector, made sparse in pieces."""
    pieces = torch.tensor_split(delta.clone(), list(cuts))
    for piece in pieces:
        sparsifier(piece, Workspace(delta.dtype))
    return torch.cat(pieces)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_trim_keeps_its_bounds_and_what_is_between_them(dtype: torch.dtype):
    low, high = torch.tensor([0.1, 0.7], dtype=dtype).tolist()
    delta = torch.tensor([0.1, -0.1, 0.7, -0.7, 0.3, 0.0], dtype=dtype)
    assert torch.equal(applied(Trim(low, high), delta), delta)
    inside = torch.nextafter(delta, torch.zeros(1, dtype=dtype))
    assert applied(Trim(low), inside)[:4].tolist() == [0, 0, *inside[2:4].tolist()]
    outside = torch.nextafter(delta, delta.sign() * math.inf)
    assert applied(Trim(low, high), outside)[:4].tolist() == [*outside[:2].tolist(), 0, 0]


def test_trim_of_nothing():
    delta = torch.tensor([1e-45, -1e-45, 0.0, 3e38])
    assert torch.equal(applied(Trim(0.0), delta), delta)
    assert torch.equal(applied(Trim(1e-45), delta), delta)
    assert torch.equal(applied(Trim(0.0, 0.0), delta), torch.zeros(4))


@pytest.mark.parametrize("density", [0.9, 0.5, 0.001])
def test_random_drop_keeps_or_drops_and_rescales(density: float):
    delta = torch.randn(5000, generator=torch.Generator().manual_seed(0)) + 5
    plain = applied(RandomDrop(MaskBits(0, "w", 0), density, rescale=False), delta)
    kept = plain != 0
    assert torch.equal(plain, delta * kept)
    scale = LEVELS / round(density * LEVELS)
    scaled = applied(RandomDrop(MaskBits(0, "w", 0), density, rescale=True), delta)
    assert torch.equal(scaled, delta * kept * scale)


def test_random_drop_does_not_depend_on_the_cut():
    delta = torch.ones(1000)
    whole = applied(RandomDrop(MaskBits(0, "w", 0), 0.5, True), delta)
    assert torch.equal(whole, applied(RandomDrop(MaskBits(0, "w", 0), 0.5, True), delta, 1, 7, 7, 600))
    assert not torch.equal(whole, applied(RandomDrop(MaskBits(0, "w", 1), 0.5, True), delta))


def test_rank_drop_does_not_depend_on_the_cut_between_rows():
    delta = torch.randn(60 * 7, generator=torch.Generator().manual_seed(0))

    def drop() -> RankDrop:
        return RankDrop(MaskBits(0, "w", 0), 0.5, 0.2, True, 7)

    assert torch.equal(applied(drop(), delta), applied(drop(), delta, 7, 70, 77))


def test_rank_drop_of_hardly_any_probability_stays_finite():
    # The smallest element of a row has 1e-9, which is rounded up to 1/65536 and not down to nothing.
    rows = torch.arange(1.0, 401.0).repeat(50)
    dropped = applied(RankDrop(MaskBits(0, "w", 0), 0.1, 0.1 - 1e-9, True, 400), rows)
    assert bool(torch.isfinite(dropped).all()) and 0.09 < float((dropped != 0).double().mean()) < 0.11


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
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
