"""Past players as opponents: snapshots of trained parameters, how one of them is chosen, and how it plays."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from torch import Tensor

from rlhf_algos import local_part
from rlhf_algos.process_group import is_main_process
from rlhf_data import UserError
from rlhf_minmax.players.snapshots import copies, fill, load_copies, save_copies
from rlhf_models import PolicyModel

OpponentSampling = Literal["latest", "uniform", "prioritised"]
_MEMBERS = "pool.json"


@dataclass(frozen=True)
class Member:
    """A player as it was after some step.

    The parameters are copies, on the CPU, of the player's trained ones in their order; of sharded ones, of
    this process's part.
    """

    step: int
    parameters: tuple[Tensor, ...]

    @classmethod
    def of(cls, step: int, player: PolicyModel) -> Member:
        """Snapshot a player."""
        return cls(step, tuple(copies(player.parameters(), "cpu")))


@contextlib.contextmanager
def playing(player: PolicyModel, member: Member) -> Iterator[PolicyModel]:
    """Within this context a player acts as a member; afterwards its own parameters are back, bit for bit.

    They come back whatever happens to the parameters meanwhile, training included.
    """
    parameters = player.parameters()
    if [local_part(p).shape for p in parameters] != [p.shape for p in member.parameters]:
        raise UserError(
            f"the snapshot of step {member.step} is of other parameters than the player's; "
            "use the model and the LoRA settings it was made with",
            code="other_parameters",
        )
    own = copies(parameters)
    fill(parameters, member.parameters)
    try:
        yield player
    finally:
        fill(parameters, own)


class OpponentPool:
    """Past versions of one player, for the other one to play against.

    A player trained against the newest opponent only may forget how to beat earlier ones and run in circles;
    fictitious self-play answers to the whole history (Heinrich et al. 2015, "Fictitious self-play in
    extensive-form games").

    When the pool is over `size`, the member goes whose two neighbours in step are closest to each other, the
    older one among equals; so the first and the newest stay, and the others spread over the history.

    Args:
        size: most members, at least 2; each takes the memory of the player's trained parameters. With 2 or 3
            all but the newest stay as early as they are.
        sampling: `latest`: the newest; `uniform`: any; `prioritised`: by `priorities`.

    Raises:
        ValueError: `size` is below 2.
    """

    def __init__(self, size: int, sampling: OpponentSampling = "uniform") -> None:
        if size < 2:
            raise ValueError(f"size must be at least 2, got {size!r}")
        self.size, self.sampling = size, sampling
        self._members: list[Member] = []
        self._payoffs: dict[int, float] = {}

    @property
    def members(self) -> tuple[Member, ...]:
        """The members, oldest first."""
        return tuple(self._members)

    def add(self, step: int, player: PolicyModel) -> None:
        """Take in the player as it is now.

        Raises:
            ValueError: `step` is not above the newest member's.
        """
        if self._members and step <= self._members[-1].step:
            raise ValueError(f"step {step} is not above {self._members[-1].step}, the newest member's")
        self._members.append(Member.of(step, player))
        if len(self._members) > self.size:
            steps = [member.step for member in self._members]
            gone = min(range(1, self.size), key=lambda i: steps[i + 1] - steps[i - 1])
            self._payoffs.pop(self._members.pop(gone).step, None)

    def record(self, step: int, payoff: float) -> None:
        """Note the learner's mean payoff, higher is better, in its last game against the member of `step`."""
        self._payoffs[step] = payoff

    def sample(self, rng: random.Random) -> Member:
        """Choose an opponent.

        Raises:
            ValueError: the pool is empty.
        """
        if not self._members:
            raise ValueError("the pool is empty; add a player first")
        if self.sampling == "latest":
            return self._members[-1]
        if self.sampling == "uniform":
            return rng.choice(self._members)
        payoffs = [self._payoffs.get(member.step) for member in self._members]
        return rng.choices(self._members, priorities(payoffs))[0]

    def save(self, folder: Path, player: PolicyModel) -> None:
        """Write members and payoffs of past versions of a player; every process must call it.

        Args:
            folder: a new one.
            player: tells how the members' parameters are split.
        """
        known = player.parameters()
        rows = [
            {"step": m.step, "tensors": len(m.parameters), "payoff": self._payoffs.get(m.step)}
            for m in self._members
        ]
        named = (
            (f"{m.step}.{i}", known[i], part) for m in self._members for i, part in enumerate(m.parameters)
        )
        save_copies(folder, named)
        if is_main_process():
            (folder / _MEMBERS).write_text(json.dumps(rows), encoding="utf-8")

    def load(self, folder: Path, player: PolicyModel) -> None:
        """Take up what `save` wrote in place of the members there are, bit for bit."""
        known = player.parameters()
        try:
            rows = json.loads((folder / _MEMBERS).read_text(encoding="utf-8"))
            like = {f"{row['step']}.{i}": known[i] for row in rows for i in range(row["tensors"])}
            tensors = {name: part.cpu() for name, part in load_copies(folder, like)}
            members = [
                Member(row["step"], tuple(tensors[f"{row['step']}.{i}"] for i in range(row["tensors"])))
                for row in rows
            ]
        except (OSError, ValueError, KeyError, IndexError, SafetensorError) as error:
            raise UserError(
                f"{folder} cannot be read as a pool of opponents ({error}); resume from another checkpoint",
                code="unreadable_file",
            ) from error
        self._members = members
        self._payoffs = {row["step"]: row["payoff"] for row in rows if row["payoff"] is not None}


def priorities(payoffs: Sequence[float | None]) -> list[float]:
    """Weights of prioritised fictitious self-play: f(p) = (1 - p)², for hard opponents.

    Vinyals et al. 2019, "Grandmaster level in StarCraft II using multi-agent reinforcement learning"
    (AlphaStar), https://doi.org/10.1038/s41586-019-1724-z, p being the chance that the learner wins. Here
    are payoffs u in place of wins: p = sigmoid((u - mean u) / deviation of u) over the opponents played, 0.5
    where all are equal. An opponent not played yet (None) has p = 0.

    Returns:
        Weights in (0, 1].
    """
    known = torch.tensor([payoff for payoff in payoffs if payoff is not None], dtype=torch.float64)
    if not len(known):
        return [1.0] * len(payoffs)
    mean, deviation = float(known.mean()), float(known.std(correction=0)) or 1.0
    return [
        1.0 if payoff is None else float(torch.sigmoid(torch.tensor((mean - payoff) / deviation))) ** 2
        for payoff in payoffs
    ]
