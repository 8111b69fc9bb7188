"""The pipeline's store: results by content address, manifest, history, current roles."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from rlhf_algos.pipeline.kinds import KINDS
from rlhf_algos.pipeline.references import Digests, files_below
from rlhf_data import RunFolder, UserError, atomic_write_json, finite, json_hash

MANIFEST, HISTORY, STAGE = "pipeline.json", "history.jsonl", "stage.json"
_FORMAT = 1
"""Incremented when stages of the same settings do something else, so that they run again."""
_PACKAGES = (
    *("rlhf-algos", "rlhf-data", "rlhf-eval", "rlhf-infer", "rlhf-merge", "rlhf-minmax", "rlhf-models"),
    *("rlhf-report", "rlhf-serve", "rlhf-train", "accelerate", "peft", "torch", "transformers", "vllm"),
)
_NOT_CONTENT = ("README.md", "lock")
"""Files that hold times or paths."""
_NOT_CONTENT_TYPES = (".png", ".html")


HUB = "hub"


@dataclass(frozen=True)
class Artefact:
    """A path that a result holds, or one from outside.

    Attributes:
        path: Relative to the pipeline's folder, or absolute, or a name on the hub.
        address: Address of the result that holds it, or the digest of a path from outside; `hub` for a name.
    """

    path: str
    address: str


@dataclass(frozen=True)
class Current:
    """Holder of a role.

    Attributes:
        artefact: The model.
        stage: The stage that promoted it; None for the model that the pipeline began with.
        measured: Its evaluations, for gates that compare with the previous model.
    """

    artefact: Artefact
    stage: str | None = None
    measured: tuple[Artefact, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `to_dict` gave."""
        measured = tuple(Artefact(**each) for each in values["measured"])
        return cls(Artefact(**values["artefact"]), values["stage"], measured)


@dataclass
class ResultStore:
    """The folder of a pipeline.

    Attributes:
        root: The folder.
        entries: The manifest's entries of stages.
        current: Holder of each role at the current stage of the run, to which references resolve.
        holders: Models promoted to each role and not withdrawn, oldest first; the last holds the role. A run
            that makes no decision leaves them unchanged.
        promotions: The last promotion of each stage: `of`, a hash of what it promoted and why; `artefact`,
            the address of what it promoted; and `role`.
        judged: The last judgement of each gate that compares with `previous`: `of` and `role`, see `Asked`,
            and what it compared with, see `Former`.
    """

    root: Path
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    current: dict[str, Current] = field(default_factory=dict)
    holders: dict[str, list[Current]] = field(default_factory=dict)
    promotions: dict[str, dict[str, str]] = field(default_factory=dict)
    judged: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._start: dict[str, Current] = {}
        self.digests = Digests(self.root / ".digests.json")
        self.versions = package_versions()

    def address(self, kind: str, settings: Any, launch: Any, files: Sequence[str], needs: Any) -> str:
        """The address of a result: a hash of all that it depends on.

        Of `files` the contents count; `settings` have addresses in place of references.
        """
        contents = {name: self.digests.of(name) for name in files}
        made_of = [_FORMAT, kind, settings, launch, contents, needs, self.versions]
        return json_hash(made_of)

    def folder(self, kind: str, address: str) -> Path:
        """The folder of a result."""
        return self.root / "results" / f"{kind}-{address[:16]}"

    def read(self, kind: str, address: str) -> dict[str, Any] | None:
        """Content of a finished result's `stage.json`; None if it is unfinished or a file was changed.

        Raises:
            UserError: the file is damaged.
        """
        folder = self.folder(kind, address)
        try:
            found = json.loads((folder / STAGE).read_text(encoding="utf-8"))
            whole = found["address"] == address and all(
                (folder / name).is_file() and self.digests.of(str(folder / name)) == entry["sha256"]
                for name, entry in found["outputs"].items()
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{folder / STAGE} is damaged ({type(error).__name__}: {error}); delete that folder to run "
                "the stage again",
                code="damaged_file",
            ) from error
        return found if whole else None

    def begin(self, model: Artefact | None) -> None:
        """Start a run: clear its entries and read the roles' holders; `model` is the policy at the start."""
        self.entries.clear()
        self._start = {} if model is None else {"policy": Current(model)}
        self.current = dict(self._start)
        try:
            manifest = self.read_manifest() or {}
        except UserError:  # damaged; it is written again
            manifest = {}
        listed = manifest.get("holders")
        if listed is None:
            listed = _holders_of_earlier(manifest)
        self.holders = {role: [Current.from_dict(each) for each in them] for role, them in listed.items()}
        self.promotions = dict(manifest.get("promotions", {}))
        judged = manifest.get("judged")
        self.judged = _judged_of_earlier(manifest) if judged is None else dict(judged)

    @property
    def held(self) -> dict[str, Current]:
        """The holder of each role."""
        return self._start | {role: holders[-1] for role, holders in self.holders.items() if holders}

    def promote(self, role: str, current: Current, address: str) -> bool:
        """Promote a stage's model to a role, unless that was its last promotion; True if the role moves.

        `address` is that of the stage's result, with the reasons.
        """
        assert current.stage is not None
        why = json_hash([current.artefact.address, address])
        last = self.promotions.get(current.stage, {})
        if last.get("of") == why and last.get("role", role) == role:
            return False
        self.promotions[current.stage] = {"of": why, "artefact": current.artefact.address, "role": role}
        holders = self.holders.setdefault(role, [])
        if holders and _same_promotion(holders[-1], current):  # accepted again, by newer evaluations
            holders[-1] = current
            return False
        holders.append(current)
        return True

    def withdraw(self, role: str, current: Current) -> bool:
        """Withdraw a stage's promotion of a model that it now rejects; True if the model held the role.

        The role goes back to the holder before it that was not rejected since and still exists, or to the
        model at the start.
        """
        holders = self.holders.get(role, [])
        had = bool(holders) and _same_promotion(holders[-1], current)
        left = [each for each in holders if not _same_promotion(each, current)]
        while had and left and not self._is_there(left[-1].artefact):
            left.pop()
        self.holders[role] = left
        last = self.promotions.get(current.stage or "", {})
        if last.get("artefact", current.artefact.address) == current.artefact.address:
            self.promotions.pop(current.stage or "", None)
        return had

    def accepted_before(self, role: str, rejected: Current) -> Current | None:
        """The last model that a stage gave a role to before it rejected this one; None if there is none."""
        own = (
            each
            for each in reversed(self.holders.get(role, []))
            if each.stage == rejected.stage and each.artefact != rejected.artefact
        )
        return next((each for each in own if self._is_there(each.artefact)), None)

    def _is_there(self, artefact: Artefact) -> bool:
        return artefact.address == HUB or os.path.exists(self.path(artefact))

    def set_aside(self, folder: Path, address: str) -> Path | None:
        """Rename a folder whose stage would mistake its content for its own work.

        Returns None, and renames nothing, if the folder does not exist or if the stage was interrupted there:
        such a stage continues in its folder.
        """
        began = not (folder / STAGE).exists() and self._last_event(address) in ("started", "failed")
        if began or not folder.exists():
            return None
        names = (f"{folder.name}.changed{number or ''}" for number in itertools.count())
        aside = next(path for path in map(folder.with_name, names) if not path.exists())
        os.rename(folder, aside)
        return aside

    def _last_event(self, address: str) -> str | None:
        """The last event in the history of the result with an address."""
        rows = RunFolder(self.root).read_lines(HISTORY)
        return next((row["event"] for row in reversed(rows) if row.get("address") == address), None)

    def finish(self, kind: str, address: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Mark a result as finished, with the hashes of its files; what `read` returns from now on."""
        folder = self.folder(kind, address)
        outputs: dict[str, Any] = {}
        for name in KINDS[kind].content:
            path = folder / name
            for file in files_below(path) if path.is_dir() else [path] if path.exists() else []:
                if file.name not in _NOT_CONTENT and file.suffix not in _NOT_CONTENT_TYPES:
                    entry = {"sha256": self.digests.of(str(file)), "size": file.stat().st_size}
                    outputs[file.relative_to(folder).as_posix()] = entry
        if not outputs:
            expected = ", ".join(KINDS[kind].content)
            raise UserError(
                f"a stage of kind {kind} ended well and left no {expected} in {folder}; see its log.txt",
                code="stage_left_nothing",
                kind=kind,
            )
        found = {"kind": kind, "address": address, "outputs": outputs, "metrics": finite(dict(metrics))}
        atomic_write_json(folder / STAGE, found)
        return found

    def path(self, artefact: Artefact) -> str:
        """The absolute path of an artefact."""
        if artefact.address == HUB:
            return artefact.path
        return os.path.normpath(os.path.join(os.path.abspath(self.root), artefact.path))

    def outside(self, name: str) -> Artefact:
        """A path that no stage left, or a name on the hub."""
        path = os.path.abspath(os.path.expanduser(name))
        return Artefact(path, self.digests.of(path)) if os.path.exists(path) else Artefact(name, HUB)

    def relative(self, path: Path) -> str:
        """A path as an artefact has it."""
        return os.path.relpath(path, self.root)

    def write_manifest(self, config: Mapping[str, Any], order: Sequence[str]) -> None:
        """Write `pipeline.json`: what every stage is made of, what it left, what is current; no times."""
        stages = {name: self.entries[name] for name in order if name in self.entries}
        current = {role: each.to_dict() for role, each in sorted(self.held.items())}
        holders = {role: [each.to_dict() for each in them] for role, them in sorted(self.holders.items())}
        manifest = {
            "format": _FORMAT,
            "config": json_hash(dict(config)),
            "versions": self.versions,
            "stages": stages,
            "current": current,
            "holders": holders,
            "promotions": self.promotions,
            "judged": self.judged,
        }
        text = json.dumps(finite(manifest), sort_keys=True)
        try:
            same = json.dumps(self.read_manifest(), sort_keys=True) == text
        except UserError:
            same = False
        if not same:
            atomic_write_json(self.root / MANIFEST, finite(manifest))
        for link in (self.root / "current").glob("*"):
            if link.is_symlink() and link.name not in self.held:
                link.unlink()
        for role, each in self.held.items():
            _point(self.root / "current" / role, self.path(each.artefact))

    def read_manifest(self) -> dict[str, Any] | None:
        """The manifest; None if there is none yet."""
        path = self.root / MANIFEST
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise UserError(
                f"{path} is damaged ({error}); delete it, the next run writes it again", code="damaged_file"
            ) from error

    def log(self, event: str, stage: str, **facts: Any) -> None:
        """Append an event to `history.jsonl`, with the time."""
        row = {"time": round(time.time(), 3), "event": event, "stage": stage, **facts}
        RunFolder(self.root).append_lines(HISTORY, [row])

    def reject(self, stage: str, address: str, verdict: Mapping[str, Any], candidate: Artefact) -> None:
        """Write why a candidate was not promoted; the candidate itself stays among the results."""
        folder = self.root / "rejected" / f"{stage}-{address[:16]}"
        reason = {"stage": stage, "candidate": asdict(candidate), **verdict}
        atomic_write_json(folder / "reason.json", finite(reason))


def _holders_of_earlier(manifest: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The holders in a manifest of a version that knew, besides who has a role, who had it just before."""
    found = {}
    for role, each in manifest.get("current", {}).items():
        before = manifest.get("promotions", {}).get(each["stage"], {}).get("before")
        both = [before, each] if before and before["artefact"] != each["artefact"] else [each]
        found[role] = [one for one in both if one["stage"] is not None]
    return found


def _judged_of_earlier(manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The judgements in a manifest of a version that compared with the stages above alone."""
    stages = manifest.get("stages", {})
    return {name: {"of": f"{each['address']} reject"} for name, each in stages.items() if "decision" in each}


def _same_promotion(one: Current, other: Current) -> bool:
    return (one.stage, one.artefact) == (other.stage, other.artefact)


def package_versions() -> dict[str, str]:
    """Versions of the packages that decide what a stage computes, as far as they are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _point(link: Path, target: str) -> None:
    """Let a link lead to a path, atomically; to a name on the hub it leads nowhere."""
    if link.parent.exists() and not link.parent.is_dir():
        raise UserError(
            f"{link.parent} is a file, expected a folder of links; delete it and run the pipeline again",
            code="not_a_folder",
            path=str(link.parent),
        )
    link.parent.mkdir(parents=True, exist_ok=True)
    where = os.path.relpath(target, link.parent) if os.path.exists(target) else target
    if link.is_symlink() and os.readlink(link) == where:
        return
    if link.is_dir() and not link.is_symlink():
        raise UserError(
            f"{link} is a folder, expected a link to a result, which a copy that follows links loses; delete "
            "it and run the pipeline again",
            code="not_a_link",
            path=str(link),
        )
    temp = link.with_name(f".{link.name}.tmp-{os.getpid()}")
    temp.unlink(missing_ok=True)
    os.symlink(where, temp)
    os.replace(temp, link)
