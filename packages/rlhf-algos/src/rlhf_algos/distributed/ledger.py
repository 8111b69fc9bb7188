"""The groups that workers have finished, in a file, so that a killed run does not do them again."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_data import UserError, json_hash
from rlhf_infer import Measured, Rollout

_LOG = logging.getLogger(__name__)
FILE = "rollouts.ledger"
_CHECKSUM = 9
"""Characters of a line before its JSON object."""


@dataclass(frozen=True)
class GroupKey:
    """Identifies a group by all that its completions depend on; groups of equal keys are equal to the bit.

    Args:
        step: the trainer's step that they are for.
        number: of the batch of prompts within the step.
        request: hash of prompts, number of completions and sampling parameters.
        weights: digest of the weights that they are sampled with.
        kind: `rollouts`, or their `rewards`, whose request is the hash of what was scored by what.
    """

    step: int
    number: int
    request: str
    weights: str = ""
    kind: Literal["rollouts", "rewards"] = "rollouts"


class Ledger:
    """An append-only file of finished groups: on each line a checksum and a JSON object.

    A line that was torn by a kill, or damaged since, is dropped when the file is opened; its group counts as
    not finished.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[
            tuple[int, int, str], tuple[GroupKey, int, int]
        ] = {}  # key, offset, bytes of a line
        with _explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
            torn = 0
            for offset, line in _lines_of(path):
                if _is_whole(line):
                    key = GroupKey(**json.loads(line[_CHECKSUM:])["key"])
                    self._places[_place(key)] = key, offset, len(line)
                else:
                    torn += 1
        if torn:
            _LOG.warning("%s: %d torn or damaged lines are dropped; those groups are done again", path, torn)
            self._rewrite()

    @property
    def num_groups(self) -> int:
        """Finished groups that the file holds."""
        return sum(key.kind == "rollouts" for key, _, _ in self._places.values())

    def find(self, key: GroupKey, prompts: Iterable[Any]) -> list[list[Rollout]] | None:
        """The completions of a group, one list for each of its prompts; None if it is not finished."""
        rows = self._find(key)
        return rows and [
            [Rollout(prompt, ids, logps, reason) for ids, logps, reason in group]
            for prompt, group in zip(prompts, rows, strict=True)
        ]

    def append(self, key: GroupKey, groups: list[list[Rollout]]) -> None:
        """Add a finished group; once this returns, a killed process does not lose it."""
        rows = [[(each.completion_ids, each.logps, each.finish_reason) for each in group] for group in groups]
        self._append(key, rows)

    def find_rewards(self, key: GroupKey) -> Measured | None:
        """Rewards of a group; None if it is not scored."""
        found = self._find(key)
        return found and Measured(*found)

    def append_rewards(self, key: GroupKey, measured: Measured) -> None:
        """Add the rewards of a group."""
        self._append(key, (measured.rows, measured.metrics))

    def _find(self, key: GroupKey) -> Any:
        found = self._places.get(_place(key))
        if found is None or found[0] != key:
            return None
        return json.loads(self._line(*found[1:])[_CHECKSUM:])[key.kind]

    def _append(self, key: GroupKey, value: Any) -> None:
        text = json.dumps({"key": vars(key), key.kind: value}, separators=(",", ":")).encode()
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        with _explained(self.path):
            offset = self._file.seek(0, os.SEEK_END)
            written = self._file.write(line)
            if written != len(line):
                raise OSError(f"{written} of {len(line)} bytes were written")
        self._places[_place(key)] = key, offset, len(line)

    def sync(self) -> None:
        """Put the file on the disk, where the machine's end does not lose it either."""
        with _explained(self.path):
            os.fsync(self._file.fileno())

    def drop_before(self, step: int) -> None:
        """Forget the groups of earlier steps, which no checkpoint asks for again."""
        if any(place[0] < step for place in self._places):
            self._places = {place: line for place, line in self._places.items() if place[0] >= step}
            self._rewrite()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _line(self, offset: int, length: int) -> bytes:
        with _explained(self.path):
            self._file.seek(offset)
            return self._file.read(length)

    def _rewrite(self) -> None:
        """Keep only the lines that count, in a file that takes the place of the old one."""
        fresh = self.path.with_name(f"{self.path.name}.new")
        places, end = {}, 0
        with _explained(fresh), fresh.open("wb") as file:
            for place, (key, offset, length) in self._places.items():
                file.write(self._line(offset, length))
                places[place] = key, end, length
                end += length
            file.flush()
            os.fsync(file.fileno())
        with _explained(self.path):
            os.replace(fresh, self.path)
            self._file.close()
            self._file = self.path.open("a+b", buffering=0)
        self._places = places


def _place(key: GroupKey) -> tuple[int, int, str]:
    return key.step, key.number, key.kind


def request_hash(prompts: Any, n: int, params: Any) -> str:
    """Hash of what is asked of an engine."""
    return json_hash([[list(map(int, prompt)) for prompt in prompts], n, vars(params)])


def lost_rollouts(step: int, version: int) -> UserError:
    """The error for a step that is not in the ledger and whose weights are gone."""
    return UserError(
        f"step {step + 1} was to be sampled with the weights after {version} steps, which no "
        "checkpoint has, and the ledger in the run's folder lacks its completions; start a new run",
        code="lost_rollouts",
        step=step + 1,
    )


def _lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    offset = 0
    with path.open("rb") as file:
        for line in file:
            yield offset, line
            offset += len(line)


def _is_whole(line: bytes) -> bool:
    text = line[_CHECKSUM:-1]
    return line.endswith(b"\n") and line[:_CHECKSUM] == b"%08x " % zlib.crc32(text)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} cannot be read or written ({error.strerror or error})", code="unwritable"
        ) from error
