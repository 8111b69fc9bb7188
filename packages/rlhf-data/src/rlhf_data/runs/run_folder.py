"""The folder of one run: config, metrics, results, samples and checkpoints, safe against kill -9."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rlhf_data.errors import UserError
from rlhf_data.runs.atomic import (
    atomic_write_json,
    atomic_write_text,
    ensure_writable_folder,
    explain_full_disk,
    finite,
    remove_folder,
    remove_stale_temps,
)
from rlhf_data.runs.checksums import find_damage
from rlhf_data.runs.paths import placed, relocated

_LOG = logging.getLogger(__name__)
_CONFIG, _METRICS, _RESULTS, _SAMPLES = "config.json", "metrics.jsonl", "results.json", "samples.jsonl"
_EVALUATION = "evaluation.json"
_CHECKPOINT = "checkpoint-"
_COMPLETE_MARK = "trainer_state.json"


class RunFolder:
    """One run's folder. Make it with `create` or `open`.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: str | Path) -> None:
        """Wrap an existing folder, without checks."""
        self.path = Path(path)

    @classmethod
    def create(
        cls,
        path: str | Path | None = None,
        *,
        job: str = "minmax",
        root: str | Path = "outputs",
        resume: bool = False,
        resumable: bool = True,
    ) -> Self:
        """Make the folder of a new run, or reuse that of an old one, freed of what killed processes left.

        Args:
            path: the run folder itself; None names a new one `<root>/<job>-<timestamp>`.
            job: the job's name.
            root: where new folders are named.
            resume: whether a folder that is not empty may be used.
            resumable: whether the job has `--resume`, which the error then names.

        Raises:
            UserError: the folder is not empty (and `resume` is off) or cannot be written to.
        """
        run = cls(_new_name(Path(root), job) if path is None else path)
        ensure_writable_folder(run.path)
        remove_stale_temps(run.path)
        if not resume and any(run.path.iterdir()):
            raise UserError(
                f"output folder {run.path} is not empty; choose another with --output-dir"
                + (" or use --resume" if resumable else ""),
                code="folder_not_empty",
            )
        return run

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open an existing run folder and remove what killed processes left half-written in it.

        Raises:
            UserError: there is no such folder.
        """
        run = cls(path)
        if not run.path.is_dir():
            raise UserError(f"run folder {run.path} does not exist; check the path", code="folder_not_found")
        remove_stale_temps(run.path)
        return run

    def write_config(self, config: dict[str, Any]) -> None:
        """Write the resolved config to `config.json`, with the place of this folder, which may be moved."""
        atomic_write_json(self.path / _CONFIG, placed(config, self.path))

    def read_config(self) -> dict[str, Any]:
        """Return the resolved config; paths are adjusted if the tree around this folder was moved.

        Raises:
            UserError: `config.json` is missing or damaged.
        """
        config = _read_json(self.path / _CONFIG)
        if config is None:
            raise UserError(
                f"run folder {self.path} has no {_CONFIG}; name the folder of a run that was started",
                code="no_config",
            )
        return relocated(config, self.path)

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        """Append one line to `metrics.jsonl` as `append_lines` does."""
        self.append_lines(_METRICS, [metrics])

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics.jsonl` in order, without a torn last line; empty if there are none.

        Raises:
            UserError: a line other than the last is damaged.
        """
        return [current_names(row) for row in self.read_lines(_METRICS)]

    def truncate_logs(self, step: int) -> None:
        """Drop the lines whose `step` is above `step`, and torn last lines, from every `.jsonl` file here.

        The others, and lines without a step, keep every byte.
        """
        for path in sorted(self.path.glob("*.jsonl")):
            _truncate_lines(path, step)

    def append_lines(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        """Append rows to a `.jsonl` file of the folder; NaN and infinities are written as null.

        The lines are handed to the operating system before this returns, so a killed process loses at most
        the one it was writing.

        Raises:
            DiskFullError: nothing can be added to the disk; the file is as it was.
        """
        _append_lines(self.path / name, rows)

    def read_lines(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of a `.jsonl` file of the folder, without a torn last line; empty without a file.

        Raises:
            UserError: a line other than the last is damaged.
        """
        return [row for _, row in _read_lines(self.path / name)]

    def write_results(self, results: dict[str, Any]) -> None:
        """Write `results.json`, which marks the run as finished; NaN and infinities become null."""
        atomic_write_json(self.path / _RESULTS, finite(results))

    def read_results(self) -> dict[str, Any] | None:
        """Return the results, or None while the run is unfinished.

        Raises:
            UserError: `results.json` is damaged.
        """
        return _read_json(self.path / _RESULTS)

    def remove_results(self) -> None:
        """Remove `results.json`, if it is there: the run is not finished any more."""
        (self.path / _RESULTS).unlink(missing_ok=True)

    def append_samples(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append lines to `samples.jsonl`."""
        self.append_lines(_SAMPLES, rows)

    def write_samples(self, rows: Sequence[dict[str, Any]]) -> None:
        """Replace `samples.jsonl` by these lines."""
        atomic_write_text(self.path / _SAMPLES, "".join(map(_line, rows)))

    def checkpoint_path(self, step: int) -> Path:
        """Return the folder of the checkpoint of `step`; write it with `atomic_folder`."""
        return self.path / f"{_CHECKPOINT}{step}"

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Return step and folder of every complete checkpoint (one with `trainer_state.json`), by step."""
        return [(step, path) for step, path in self._folders() if (path / _COMPLETE_MARK).exists()]

    def latest_checkpoint(self) -> Path | None:
        """Return the folder of the last whole checkpoint, None if there are no checkpoints at all.

        Every file is compared with the checksums written with it. A damaged checkpoint is passed over for
        the one before it, and a warning in the log says which and why.

        Raises:
            UserError: there are checkpoints, and each of them is damaged.
        """
        damage = ""
        for _, path in reversed(self._folders()):
            found = find_damage(path)
            if found is None:
                return path
            damage = f"{path.name}: {found}"
            _LOG.warning("checkpoint %s is damaged and passed over: %s", path, found)
        if damage:
            raise UserError(
                f"{self.path} has no whole checkpoint ({damage}); delete its damaged ones to begin this run "
                "again, or start a new run",
                code="no_whole_checkpoint",
            )
        return None

    def prune_checkpoints(self, keep: int, *, best: int | None = None, pinned: int | None = None) -> None:
        """Remove the oldest checkpoints until `keep` (at least 1) are left.

        Those of the steps `best` and `pinned` stay too.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        for step, path in self.checkpoints()[:-keep]:
            if step not in (best, pinned):
                remove_folder(path)

    def drop_checkpoints_after(self, step: int, *, but: int | None = None) -> None:
        """Remove the checkpoints of steps after `step`, damaged ones too, but not that of step `but`."""
        for later, path in self._folders():
            if later > step and later != but:
                remove_folder(path)

    def _folders(self) -> list[tuple[int, Path]]:
        """Step and folder of everything named as a checkpoint, by step."""
        named = [(path.name.removeprefix(_CHECKPOINT), path) for path in self.path.glob(f"{_CHECKPOINT}*")]
        return sorted((int(step), path) for step, path in named if step.isdecimal() and path.is_dir())


def current_names(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics by their present names: in older runs of the game, those of evaluations begin with `eval/`."""
    return {f"eval_{name[5:]}" if name.startswith("eval/") else name: metrics[name] for name in metrics}


def newest_unfinished(root: str | Path = "outputs", job: str = "minmax") -> RunFolder | None:
    """Return the newest run of a job under `root` that was begun but has no results, if there is one.

    A folder in which a model was only evaluated, never trained, is not such a run.
    """
    folders = [path.parent for path in sorted(Path(root).glob(f"{job}-*/{_CONFIG}"), reverse=True)]
    unfinished = (path for path in folders if not (path / _RESULTS).exists() and not _only_evaluated(path))
    return next(map(RunFolder.open, unfinished), None)


def _only_evaluated(folder: Path) -> bool:
    return (folder / _EVALUATION).exists() and not (folder / _METRICS).exists()


def _new_name(root: Path, job: str) -> Path:
    base = root / f"{job}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, count = base, 1
    while path.exists():
        count += 1
        path = base.with_name(f"{base.name}-{count}")
    return path


def _line(row: dict[str, Any]) -> str:
    return json.dumps(finite(row), ensure_ascii=False, allow_nan=False) + "\n"


def _append_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    data = memoryview("".join(map(_line, rows)).encode("utf-8"))
    with explain_full_disk(path), open(path, "ab+", buffering=0) as file:
        _drop_torn_line(file.fileno())
        size = os.lseek(file.fileno(), 0, os.SEEK_END)
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file.fileno(), size)
            raise


def _truncate_lines(path: Path, step: int) -> None:
    if path.exists():
        kept = [text for text, row in _read_lines(path) if row.get("step", 0) <= step]
        atomic_write_text(path, "".join(kept))


def _drop_torn_line(handle: int) -> None:
    size = os.lseek(handle, 0, os.SEEK_END)
    if size == 0 or os.pread(handle, 1, size - 1) == b"\n":
        return
    os.ftruncate(handle, os.pread(handle, size, 0).rfind(b"\n") + 1)


def _read_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return text (with its line end) and value of each whole line."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    lines = []
    for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
        try:
            text = line.decode("utf-8")
            lines.append((text + "\n", json.loads(text)))
        except ValueError as error:
            raise UserError(
                f"{path}, line {number}: damaged ({error}); remove that line",
                code="damaged_file",
                line=number,
            ) from error
    return lines


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(
            f"{path}: damaged ({error}); restore it or start a new run", code="damaged_file"
        ) from error
