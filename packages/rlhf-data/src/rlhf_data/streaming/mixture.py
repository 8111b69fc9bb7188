"""Several sources in one stream, each with its weight."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf_data.errors import UserError
from rlhf_data.streaming.records import Records, RecordSource

_PERIOD = 1000
"""Positions after which the pattern of sources repeats; weights are rounded to its parts."""


class DatasetMixture:
    """Records of several sources, of which each gets its share of every stretch of the stream.

    Which source a position is of, and how many came from it before, follows from the position alone. A source
    goes through all its rows before one comes again, in another order; so a small source with a large weight
    is repeated within an epoch, and of a large one with a small weight an epoch shows a part, the next epoch
    the next part. An epoch has as many positions as the sources together.

    Args:
        sources: each with its weight, a positive number; only the ratios count, to a thousandth.

    Attributes:
        fingerprint: names sources and weights.
        content: changes with what is in the sources, and with their weights.

    Raises:
        UserError: there is no source, or a weight is not above 0.
    """

    def __init__(self, sources: Sequence[tuple[RecordSource, float]]) -> None:
        if not 0 < len(sources) < _PERIOD or not all(0 < weight < float("inf") for _, weight in sources):
            raise UserError(
                f"a mixture has at least one source and fewer than {_PERIOD}, each with a weight above 0",
                code="invalid_value",
            )
        self._sources = [source for source, _ in sources]
        self._counts = _rounded([weight for _, weight in sources])
        self.fingerprint = json.dumps([[source.fingerprint for source in self._sources], self._counts])
        self.content = json.dumps([[source.content for source in self._sources], self._counts])
        # Each source's draws are spread evenly over the period; ties go to the earlier source.
        draws = sorted(
            ((number + 0.5) / count, source, number)
            for source, count in enumerate(self._counts)
            for number in range(count)
        )
        self._pattern = [(source, number) for _, source, number in draws]
        self._firsts = np.cumsum([0, *map(len, self._sources)]).tolist()

    def __len__(self) -> int:
        return self._firsts[-1]

    def order(self, epoch: int, *, seed: int | None) -> Sequence[int]:
        """See `RecordSource`; the numbers of a source follow those of the source before."""
        return _MixedOrder(self._sources, self._firsts, self._counts, self._pattern, (epoch, seed))

    def read(self, numbers: Sequence[int]) -> list[Records]:
        """See `RecordSource`."""
        places = np.searchsorted(self._firsts, numbers, side="right") - 1
        found: list[Any] = [None] * len(numbers)
        for place in set(places.tolist()):
            at = np.flatnonzero(places == place).tolist()
            own = [int(numbers[i]) - self._firsts[place] for i in at]
            for i, records in zip(at, self._sources[place].read(own), strict=True):
                found[i] = records
        return found


class _MixedOrder(Sequence[int]):
    def __init__(
        self,
        sources: Sequence[RecordSource],
        firsts: Sequence[int],
        counts: Sequence[int],
        pattern: Sequence[tuple[int, int]],
        epoch_and_seed: tuple[int, int | None],
    ) -> None:
        self._sources, self._firsts, self._counts, self._pattern = sources, firsts, counts, pattern
        self._epoch, self._seed = epoch_and_seed
        self._orders: dict[int, tuple[int, Sequence[int]]] = {}

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        period, place = divmod(self._epoch * len(self) + index, _PERIOD)
        source, number = self._pattern[place]
        passed, position = divmod(period * self._counts[source] + number, len(self._sources[source]))
        if self._orders.get(source, (None,))[0] != passed:
            seed = None if self._seed is None else self._seed + source
            self._orders[source] = passed, self._sources[source].order(passed, seed=seed)
        return self._firsts[source] + self._orders[source][1][position]


def _rounded(weights: Sequence[float]) -> list[int]:
    """Parts of a period by largest remainder, at least one for each source."""
    exact = np.array(weights) / sum(weights) * _PERIOD
    counts = np.maximum(1, np.floor(exact).astype(int))
    while counts.sum() < _PERIOD:
        counts[np.argmax(exact - counts)] += 1
    while counts.sum() > _PERIOD:  # tiny weights were rounded up, at the cost of the largest
        counts[np.argmax(counts)] -= 1
    return counts.tolist()
