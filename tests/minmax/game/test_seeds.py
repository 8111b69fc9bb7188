"""The seeds of a game: the same ones as in earlier runs, and none of them used twice within a run."""

from __future__ import annotations

from rlhf_minmax.game.seeds import CRITIQUES, POLICY_CRITIQUES, epoch_seed, later_seed, step_seed


def test_the_seeds_of_earlier_runs_stay() -> None:
    assert (step_seed(0, 0), step_seed(0, 7), step_seed(3, 7)) == (0, 70, 3_000_079)
    assert (epoch_seed(0, 2), epoch_seed(3, 2)) == (2, 3_000_011)
    assert later_seed(5, 4) == 45 and (CRITIQUES, POLICY_CRITIQUES) == (1, 2)


def test_no_two_steps_of_a_run_share_a_seed() -> None:
    offsets = (0, CRITIQUES, POLICY_CRITIQUES, POLICY_CRITIQUES + CRITIQUES)
    used = [step_seed(1, step) + offset for step in range(50) for offset in offsets]
    assert len(set(used)) == len(used)
