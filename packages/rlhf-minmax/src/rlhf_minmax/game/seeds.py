"""The seeds of a game: of a step, of a permutation of the stories, and of what is sampled in a step.

They are part of what makes a run repeatable: other numbers here are other games.
"""

from __future__ import annotations

_PER_RUN = 1_000_003
"""Distance of the seeds of two runs: with fewer than 100,000 steps they share no step's seed."""
_PER_STEP = 10
"""More than the offsets below need, so that no step uses a seed of the next."""

CRITIQUES = 1
"""Offset of the critiques' seed from that of the answers they criticise."""
POLICY_CRITIQUES = 2
"""Offset of the seed of the policy's turn, with its fresh critiques and checks, from the step's seed."""


def step_seed(run_seed: int, step: int) -> int:
    """The seed of a step counted from 0, or of a forward pass outside of a training: that of its answers."""
    return later_seed(run_seed * _PER_RUN, step)


def later_seed(first: int, step: int) -> int:
    """The seed of a step counted from 0, where step 0 has the seed `first`."""
    return first + _PER_STEP * step


def epoch_seed(run_seed: int, epoch: int) -> int:
    """The seed of an epoch's permutation of the stories; epochs are counted from 0."""
    return run_seed * _PER_RUN + epoch
