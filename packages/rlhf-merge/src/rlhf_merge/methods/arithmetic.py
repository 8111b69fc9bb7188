"""Arithmetic on one tensor of the models, block by block: sums, scalar products, task vectors made sparse."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_merge.methods.blocks import Inputs, Workspace
from rlhf_merge.methods.spec import Step, Values

Vector = Matrix = NDArray[np.float64]
LEVELS = 1 << 16
"""Probabilities are multiples of 1/65536: what is kept is divided by the exact probability to keep it."""
_HIGH_BITS, _LOW_BITS = 15, 16
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}

Sparsify = Callable[[Tensor, Workspace], None]
"""Sets elements of a block of a task vector to zero and rescales others, in place; blocks come in order."""

_PIECE = 4096
"""Elements whose products are summed in the type of the arithmetic. In float32, sums over a whole block had
relative errors of 7e-6, sums over such pieces 3e-8, in the same time."""


def combine(inputs: Inputs, coefficients: Sequence[float] | Vector) -> Step:
    """Σ cᵢ xᵢ, or base + Σ cᵢ (xᵢ - base).

    Sums of models are taken as the model with the largest coefficient plus differences to it, so that equal
    models merge to themselves to the bit where the coefficients sum to 1; a model with coefficient 0 is not
    read.
    """
    values = tuple(float(value) for value in coefficients)
    used = [index for index, value in enumerate(values) if value]
    origin, total = inputs.base, 1.0
    if origin is None:
        largest = max(used, key=lambda index: abs(values[index]), default=0)
        origin, total = inputs.models[largest], sum(values)
        used = [index for index in used if index != largest]
        total = 1.0 if abs(total - 1) < 1e-12 else total

    def merge(start: int, stop: int, space: Workspace) -> Tensor:
        size = stop - start
        anchor = inputs.read(origin, start, stop, space.take("base", size))
        out = torch.mul(anchor, total, out=space.take("out", size))
        for index in used:
            other = inputs.read(inputs.models[index], start, stop, space.take("model", size))
            out.sub_(torch.sub(anchor, other, out=other), alpha=values[index])
        return out

    return Step(merge, values)


def sum_task_vectors(
    inputs: Inputs, values: Values, sparsify: Sequence[Sparsify | None], row_length: int = 1
) -> Step:
    """θ₀ + λ · merged task vectors, each first made sparse by its entry of `sparsify`, if that is not None.

    The inputs have a base. Signs are elected, as TIES does, where the values have a sign, mass or count.
    """
    weights, sign = values.of("weight"), values.shared.get("sign")
    normalize, factor = bool(values.shared["normalize"]), float(values.shared["lambda"])
    coefficients = [factor * weight for weight in weights]
    if normalize and sign is None:
        total = sum(weights)
        factor, coefficients = factor / total, [value / total for value in coefficients]

    def deltas(base: Tensor, start: int, stop: int, space: Workspace) -> Iterator[tuple[float, Tensor]]:
        """Every weight that is not 0, with its sparse and weighted task vector, negated.

        Negated, because their sum is subtracted from the base: where models are equal it is +0, and x - 0
        keeps a -0 of the base.
        """
        for index, weight in enumerate(weights):
            if not weight:
                continue
            buffer = space.take("model" if sign is None else f"delta {index}", stop - start)
            delta = torch.sub(base, inputs.read(inputs.models[index], start, stop, buffer), out=buffer)
            make_sparse = sparsify[index]
            if make_sparse is not None:
                make_sparse(delta, space)
            yield weight, delta.mul_(weight)

    def merge(start: int, stop: int, space: Workspace) -> Tensor:
        base = inputs.read(inputs.base, start, stop, space.take("base", stop - start))
        change = space.take("out", stop - start).zero_()
        if sign is not None:
            _elect(change, list(deltas(base, start, stop, space)), space, sign == "mass", normalize)
        else:
            for _, delta in deltas(base, start, stop, space):
                change.add_(delta)
        return torch.sub(base, change.mul_(factor), out=change)

    return Step(merge, tuple(coefficients), row_length)


def _elect(
    change: Tensor, deltas: list[tuple[float, Tensor]], space: Workspace, mass: bool, normalize: bool
) -> None:
    """Add up the elements that have the elected sign; where no sign wins, none."""
    scratch = space.take("model", change.numel())
    votes = space.take("votes", change.numel()).zero_()
    for _, delta in deltas:
        votes.add_(delta if mass else torch.sign(delta, out=scratch))
    votes.sign_()
    divisor = space.take("divisor", change.numel()).zero_() if normalize else None
    for weight, delta in deltas:
        agreeing = delta.mul_(votes).relu_()
        change.add_(agreeing)
        if divisor is not None:
            divisor.add_(torch.sign(agreeing, out=scratch), alpha=abs(weight))
    if divisor is not None:
        change.div_(divisor.clamp_(min=torch.finfo(change.dtype).tiny))
    change.mul_(votes)


def gram(inputs: Inputs, space: Workspace) -> Matrix:
    """Scalar products (n, n) of the models or, with a base, of the task vectors, summed in float64."""
    count = len(inputs.models)
    total = np.zeros((count, count))
    for start, stop in inputs.ranges():
        rows = space.take_rows("rows", count, stop - start)
        for row, model in zip(rows, inputs.models, strict=True):
            inputs.read(model, start, stop, row)
        if inputs.base is not None:
            rows.sub_(inputs.read(inputs.base, start, stop, space.take("base", stop - start)))
        total += products(rows)
    return total


def products(rows: Tensor) -> Matrix:
    """Scalar products (n, n) of rows, in float64 where float32 cannot hold them."""
    whole = rows.shape[1] // _PIECE * _PIECE
    pieces = rows[:, :whole].unflatten(1, (-1, _PIECE)).transpose(0, 1)
    rest = rows[:, whole:]
    found = torch.bmm(pieces, pieces.transpose(1, 2)).sum(0, dtype=torch.float64) + (rest @ rest.T)
    return found.numpy() if bool(found.isfinite().all()) else (rows.double() @ rows.double().T).numpy()


def task_vector_magnitudes(
    inputs: Inputs, space: Workspace, ranks: Sequence[Sequence[int]]
) -> list[list[float]]:
    """The k-th largest magnitudes of the task vectors."""

    def blocks() -> Iterator[tuple[int, Tensor]]:
        for start, stop in inputs.ranges():
            base = inputs.read(inputs.base, start, stop, space.take("base", stop - start))
            for index, model in enumerate(inputs.models):
                if ranks[index]:
                    delta = inputs.read(model, start, stop, space.take("model", stop - start))
                    yield index, delta.sub_(base).abs_()

    return largest_magnitudes(blocks, ranks, space.dtype) if any(ranks) else [[] for _ in ranks]


def trim(low: float, high: float = math.inf) -> Sparsify:
    """Keep the magnitudes from `low` to `high`, both included."""

    def sparsify(delta: Tensor, space: Workspace) -> None:
        if high < math.inf:
            delta.sub_(torch.hardshrink(delta, high))
        # hardshrink keeps what is greater: than the number before `low`, except that 0 stays 0.
        least = torch.tensor(low, dtype=delta.dtype)
        delta.copy_(torch.hardshrink(delta, float(torch.nextafter(least, torch.zeros_like(least)))))

    return sparsify


def random_drop(bits: MaskBits, density: float, rescale: bool) -> Sparsify:
    """DARE: keep each element with the probability `density`, a multiple of 1/65536, and divide by it."""
    levels = max(1, round(density * LEVELS))
    scale = LEVELS / levels if rescale else 1.0

    def sparsify(delta: Tensor, space: Workspace) -> None:
        numbers = bits.take(space.take("mask", delta.numel()))
        delta.mul_(numbers.neg_().add_(levels).clamp_(0, 1))
        if scale != 1:
            delta.mul_(scale)

    return sparsify


def rank_drop(bits: MaskBits, density: float, epsilon: float, rescale: bool, row_length: int) -> Sparsify:
    """DELLA's MagPrune: the larger an element is within its row, the more probably it is kept.

    The elements of a row of `row_length` have the probabilities density - epsilon (the smallest) to density +
    epsilon (the largest), in even steps of their rank; what is kept is divided by its own probability.
    """
    slope = 2 * epsilon / max(1, row_length - 1)
    middle = 0.5 if row_length == 1 else 0.0

    def sparsify(delta: Tensor, space: Workspace) -> None:
        ranks = row_ranks(delta.view(-1, row_length).abs()).to(delta.dtype)
        probability = ranks.add_(middle).mul_(slope).add_(density - epsilon)
        levels = probability.mul_(LEVELS).round_().clamp_(1, LEVELS).view(-1)
        numbers = bits.take(space.take("mask", delta.numel()))
        delta.mul_(numbers.neg_().add_(levels).clamp_(0, 1))
        if rescale:
            delta.mul_(levels.reciprocal_().mul_(LEVELS))

    return sparsify


def row_ranks(magnitudes: Tensor) -> Tensor:
    """The rank of each element in its row, from 0 for the smallest; among equals the first comes first."""
    if magnitudes.dtype == torch.float64:
        order = torch.sort(magnitudes, dim=1, stable=True).indices
    else:  # numpy sorts integers with vector instructions; the column makes equal magnitudes unequal
        columns = np.arange(magnitudes.shape[1], dtype=np.int64)
        keys = (magnitudes.view(torch.int32).numpy().astype(np.int64) << 32) | columns
        keys.sort(axis=1)
        order = torch.from_numpy(keys & 0xFFFFFFFF)
    places = torch.arange(magnitudes.shape[1]).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def kept_count(density: float, numel: int) -> int:
    """⌊density · numel⌋, density in (0, 1], and at least one."""
    return min(numel, max(1, share_count(density, numel)))


def share_count(share: float, numel: int) -> int:
    """⌊share · numel⌋, with no element lost to rounding: 0.29 of 100 are 29 and 2/3 of 3 are 2."""
    return int(share * numel * (1 + 1e-14))


class MaskBits:
    """A stream of random 16-bit numbers for one model's tensor, the same everywhere and however it is cut."""

    def __init__(self, seed: int, name: str, model: int):
        digest = np.frombuffer(hashlib.blake2b(name.encode(), digest_size=16).digest(), dtype=np.uint32)
        self._bits = np.random.SFC64(np.random.SeedSequence([seed, model, *(int(word) for word in digest)]))
        self._left = np.empty(0, dtype=np.int16)

    def take(self, out: Tensor) -> Tensor:
        """Fill `out`, (n,), with the next numbers, as floating-point whole numbers in [0, 65536)."""
        missing = out.numel() - len(self._left)
        if missing > 0:
            fresh = self._bits.random_raw(-(-missing // 4)).view(np.int16)
            self._left = np.concatenate([self._left, fresh]) if len(self._left) else fresh
        now, self._left = self._left[: out.numel()], self._left[out.numel() :]
        return out.copy_(torch.from_numpy(now)).add_(LEVELS // 2)


class _Search:
    """The search for one magnitude: the bits known so far, and its rank among the elements that have them."""

    def __init__(self, rank: int):
        self.rank, self.prefix = rank, 0

    def refine(self, histogram: Tensor, bits: int) -> None:
        """Find the next bits by the counts (2**bits,) of the elements that begin with the known ones."""
        from_the_top = histogram.flip(0).cumsum(0)
        place = int(torch.searchsorted(from_the_top, self.rank))
        found = len(histogram) - 1 - place
        self.rank -= int(from_the_top[place] - histogram[found])
        self.prefix = (self.prefix << bits) | found


def largest_magnitudes(
    blocks: Callable[[], Iterable[tuple[int, Tensor]]],
    ranks: Sequence[Sequence[int]],
    dtype: torch.dtype = torch.float32,
) -> list[list[float]]:
    """The k-th largest magnitudes of several streamed tensors, for each tensor in the order of its k's.

    They are found exactly, in memory that does not grow with the tensors: floating-point numbers without a
    sign are ordered as their bit patterns are. A histogram of the highest 15 bits finds the bin of the k-th
    largest; histograms of the next 16 bits, of the elements in that bin alone, refine it. That is two passes
    over float32 and four over float64, whatever the values, and no sorting.

    `blocks` streams the magnitudes, float32 or float64, each block with the number of its tensor, at every
    pass. `ranks` are the k's of each tensor.
    """
    searches = [[_Search(rank) for rank in wanted] for wanted in ranks]
    integers, bits = _INTEGERS[dtype], _HIGH_BITS
    shift = dtype.itemsize * 8 - 1 - bits
    while shift >= 0:
        bins = 1 << bits
        counts = [{search.prefix: torch.zeros(bins, dtype=torch.long) for search in of} for of in searches]
        for index, block in blocks():
            values = block.view(integers)
            for prefix, histogram in counts[index].items():
                if bits == _HIGH_BITS:
                    histogram += torch.bincount(values >> shift, minlength=bins)
                    continue
                array = values.numpy()  # which compares and selects several times faster than torch
                known = array[(array & ~((1 << (shift + bits)) - 1)) == prefix << (shift + bits)]
                histogram += torch.bincount((torch.from_numpy(known) >> shift) & (bins - 1), minlength=bins)
        for of, histograms in zip(searches, counts, strict=True):
            for search in of:
                search.refine(histograms[search.prefix], bits)
        shift, bits = shift - _LOW_BITS, _LOW_BITS
    return [[float(torch.tensor(one.prefix, dtype=integers).view(dtype)) for one in of] for of in searches]
