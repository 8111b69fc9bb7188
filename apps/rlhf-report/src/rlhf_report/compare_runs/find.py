"""Finding training runs among arguments and in folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_data import UserError
from rlhf_report.options import split_name

_METRICS, _CONFIG, _STATE = "metrics.jsonl", "config.json", "trainer_state.json"
_ROWS = ("*.arrow", "*.parquet", "dataset_info.json", "dataset_dict.json")
_DEPTH = 2


@dataclass(frozen=True)
class FoundRun:
    """A run before its log is read; `group`: name to compare under; None: the run's method."""

    path: Path
    group: str | None


def are_runs(entries: Sequence[str]) -> bool:
    """Whether training runs are compared; if not, files of answers are."""
    paths = [Path(split_name(entry)[1]) for entry in entries]
    kinds = [_is_runs(path) for path in paths]
    if any(kinds) and not all(kinds):
        run, other = paths[kinds.index(True)], paths[kinds.index(False)]
        if not other.exists():
            raise UserError(
                f"{other} does not exist; give the folder of a run, or its log", code="file_not_found"
            )
        raise UserError(
            f"{run} is a training run and {other} is a file of answers; compare one kind at a time"
        )
    return all(kinds)


def find_runs(entries: Sequence[str]) -> list[FoundRun]:
    """The runs of all arguments, in their order; those of a folder of runs by name."""
    found: list[FoundRun] = []
    for entry in entries:
        name, given = split_name(entry)
        path = Path(given)
        if path.name == _METRICS and (path.parent / _CONFIG).exists():
            path = path.parent
        runs = [path] if _is_log(path) else _below(path, _DEPTH)
        if not runs:
            raise UserError(
                f"{path} holds no training run; expected a folder with {_METRICS}, TRL's checkpoints, or "
                "<method>/seed-<n>/ folders of such runs",
                code="wrong_folder",
            )
        groups = {_group_of(each) for each in runs}
        if name is not None and len(groups) > 1:
            shown = ", ".join(sorted(str(group) for group in groups))
            raise UserError(
                f"{entry} would be one name for runs of {shown}; name each of them", code="repeated_name"
            )
        found += [FoundRun(each, name or _group_of(each)) for each in runs]
    places = [each.path.resolve() for each in found]
    for place, each in zip(places, found, strict=True):
        if places.count(place) > 1:
            raise UserError(
                f"{each.path} is given twice; give one run for each seed",
                code="repeated_name",
            )
    return found


def _is_runs(path: Path) -> bool:
    if path.is_dir():
        return not any(next(path.glob(pattern), None) for pattern in _ROWS)
    return _is_log(path)


def _is_log(path: Path) -> bool:
    """Whether this is one run: its folder, a `trainer_state.json`, or JSON lines as verl writes them."""
    if path.is_dir():
        return (path / _METRICS).exists() or _has_state(path) or _is_begun(path / _CONFIG)
    if path.name in (_METRICS, _STATE):
        return path.is_file()
    return path.suffix == ".jsonl" and path.is_file() and _is_verl(path)


def _is_begun(config: Path) -> bool:
    """Whether these are the settings of a run, which may have logged nothing yet, and not a model's."""
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and ("method" in found or "policy_model" in found)


def _has_state(path: Path) -> bool:
    return (path / _STATE).exists() or any(path.glob(f"checkpoint-*/{_STATE}"))


def _is_verl(path: Path) -> bool:
    try:
        with open(path, encoding="utf-8") as lines:
            row = json.loads(lines.readline())
    except (OSError, ValueError):
        return False
    return isinstance(row, dict) and isinstance(row.get("data"), dict) and isinstance(row.get("step"), int)


def _below(path: Path, depth: int) -> list[Path]:
    found = []
    for each in sorted(path.iterdir(), key=lambda child: child.name):
        if _is_log(each):
            found.append(each)
        elif each.is_dir() and depth > 1:
            found += _below(each, depth - 1)
    return found


def _group_of(path: Path) -> str | None:
    """The method's name in `<method>/seed-<n>/`; None if the folders do not say."""
    whole = path.resolve()
    return whole.parent.name if whole.name.startswith("seed-") else None
