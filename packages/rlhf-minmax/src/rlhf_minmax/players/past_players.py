"""Past players: snapshots of trained parameters, which of them are kept, and how one plays."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from rlhf_algos import local_part
from rlhf_algos.process_group import is_main_process
from rlhf_data import UserError
from rlhf_minmax.players.snapshots import copies, fill, load_copies, save_copies
from rlhf_models import PolicyModel

MOST = 5
"""Past versions of a player that are kept."""
_MEMBERS = "members.json"


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

    They are restored whatever happens to the parameters meanwhile, training included.
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


class PastPlayers:
    """Past versions of one player, spread over the run.

    When there are more than `MOST`, the one goes whose two neighbours in step are closest to each other, the
    older one among equals; so the first and the newest stay. Each takes the memory of the player's trained
    parameters.
    """

    def __init__(self) -> None:
        self.members: list[Member] = []
        """The oldest first."""

    def add(self, step: int, player: PolicyModel) -> None:
        """Add the player as it is now.

        Raises:
            ValueError: `step` is not above the newest member's.
        """
        if self.members and step <= self.members[-1].step:
            raise ValueError(f"step {step} is not above {self.members[-1].step}, the newest member's")
        self.members.append(Member.of(step, player))
        if len(self.members) > MOST:
            steps = [member.step for member in self.members]
            del self.members[min(range(1, MOST), key=lambda i: steps[i + 1] - steps[i - 1])]

    def save(self, folder: Path, player: PolicyModel) -> None:
        """Write the past versions of a player; every process must call it.

        Args:
            folder: a new one.
            player: tells how the members' parameters are split.
        """
        known = player.parameters()
        rows = [{"step": m.step, "tensors": len(m.parameters)} for m in self.members]
        named = (
            (f"{m.step}.{i}", known[i], part) for m in self.members for i, part in enumerate(m.parameters)
        )
        save_copies(folder, named)
        if is_main_process():
            (folder / _MEMBERS).write_text(json.dumps(rows), encoding="utf-8")

    def load(self, folder: Path, player: PolicyModel) -> None:
        """Replace the members by those that `save` wrote, bit for bit."""
        known = player.parameters()
        try:
            rows = json.loads((folder / _MEMBERS).read_text(encoding="utf-8"))
            like = {f"{row['step']}.{i}": known[i] for row in rows for i in range(row["tensors"])}
            tensors = {name: part.cpu() for name, part in load_copies(folder, like)}
            self.members = [
                Member(row["step"], tuple(tensors[f"{row['step']}.{i}"] for i in range(row["tensors"])))
                for row in rows
            ]
        except (OSError, ValueError, KeyError, IndexError, SafetensorError) as error:
            raise UserError(
                f"{folder} cannot be read as past players ({error}); resume from another checkpoint",
                code="unreadable_file",
            ) from error
