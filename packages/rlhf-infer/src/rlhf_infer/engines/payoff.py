"""Whether guessing tokens pays, from the time that passes take with guesses and without."""

from __future__ import annotations

from dataclasses import dataclass, field

_TRIAL = 4
"""Passes that say how fast a way is."""
_PATIENCE = 64
"""Passes after which the slower way is tried again, and twice as many each time after that."""
_FADE = 0.9
"""What a pass counts for after one more."""


@dataclass
class _Way:
    """Tokens and seconds of passes, the earlier the less, and how many there were."""

    tokens: float = 0.0
    seconds: float = 0.0
    passes: int = 0

    @property
    def pace(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


@dataclass
class _Ways:
    """Passes over like numbers of rows: `ways[1]` with guesses, `ways[0]` without."""

    ways: tuple[_Way, _Way] = field(default_factory=lambda: (_Way(), _Way()))
    wait: int = _PATIENCE
    left: int = _PATIENCE


class Payoff:
    """Decides pass by pass, for each number of rows by itself, rounded to a power of two."""

    def __init__(self) -> None:
        self._known: dict[int, _Ways] = {}

    def pays(self, rows: int) -> bool:
        """Whether to guess in the next pass over so many rows: the faster way, now and then the other."""
        known = self._of(rows)
        plain, guessing = known.ways
        if guessing.passes < _TRIAL:
            return True
        if plain.passes < _TRIAL:
            return False
        better = guessing.pace > plain.pace
        known.left -= 1
        if known.left > 0:
            return better
        if known.left <= -_TRIAL:
            known.wait *= 2
            known.left = known.wait
        return not better

    def gained(self, rows: int, guessed: bool, tokens: int) -> None:
        """Count tokens that a pass brought."""
        self._of(rows).ways[guessed].tokens += tokens

    def took(self, rows: int, guessed: bool, seconds: float) -> None:
        """Count the time of a pass."""
        way = self._of(rows).ways[guessed]
        way.tokens, way.seconds = _FADE * way.tokens, _FADE * way.seconds + seconds
        way.passes += 1

    def _of(self, rows: int) -> _Ways:
        return self._known.setdefault(max(rows, 1).bit_length(), _Ways())
