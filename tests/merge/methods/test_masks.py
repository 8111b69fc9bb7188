"""Random masks: which numbers they depend on, and how they are distributed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlhf_merge.methods.sparsify import LEVELS, MaskBits, quantised


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_whole_numbers_evenly_spread(dtype: torch.dtype):
    numbers = MaskBits(5, "w", 0).take(torch.empty(200_000, dtype=dtype))
    assert numbers.dtype == dtype and torch.equal(numbers, numbers.round())
    assert 0 <= float(numbers.min()) < 10 and LEVELS - 10 < float(numbers.max()) <= LEVELS - 1
    counts = torch.histc(numbers.double(), 16, 0, LEVELS)
    # Chi-squared with 15 degrees of freedom is below 50 in all but one of 100,000 draws.
    expected = len(numbers) / 16
    assert float(((counts - expected) ** 2 / expected).sum()) < 50


@pytest.mark.parametrize(
    ("probability", "levels"), [(1.0, 65536), (0.5, 32768), (0.3, 19661), (1e-9, 1), (1.4 / 65536, 1)]
)
def test_probabilities_are_multiples_of_a_level(probability: float, levels: int):
    assert quantised(probability) == levels
