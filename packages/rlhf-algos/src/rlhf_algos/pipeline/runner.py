"""Runs a pipeline: every stage whose result is not there yet, each in processes of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_algos.pipeline.config import PipelineConfig, Selection, Stage
from rlhf_algos.pipeline.former import Asked, Former, former_of
from rlhf_algos.pipeline.kinds import KINDS
from rlhf_algos.pipeline.launch import Launch, OnEvent, Planned, execute, launch
from rlhf_algos.pipeline.measured import collapse_alarms
from rlhf_algos.pipeline.references import Reference, named_files, references_in, replaced
from rlhf_algos.pipeline.results import Artefact, Current, ResultStore
from rlhf_data import RunFolder, UserError, alone_in


@dataclass
class Pipeline:
    """A pipeline in its folder.

    Attributes:
        config: The settings.
        root: The folder, which may hold results of earlier runs.
        on_event: Told what happens.
        launch: Runs the process of a stage, see `rlhf_algos.pipeline.launch.launch`.
    """

    config: PipelineConfig
    root: Path
    on_event: OnEvent = lambda event, stage, text: None
    launch: Launch = launch
    store: ResultStore = field(init=False)
    stages: list[Stage] = field(init=False)
    _undecided: dict[str, str] = field(init=False, default_factory=dict)
    """Roles whose last promotion is not known, as its stage has not run."""
    _addresses: dict[str, str] = field(init=False, default_factory=dict)
    _ended: set[str] = field(init=False, default_factory=set)
    """Loops that a gate ended; `""` is the whole pipeline."""
    _running: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.stages = self.config.expanded()
        self.store = ResultStore(self.root)

    @property
    def stopped(self) -> bool:
        """Whether a gate outside of loops has ended the last run."""
        return "" in self._ended

    def run(self, selection: Selection | None = None) -> dict[str, Any]:
        """Run what is selected and not there yet; the manifest.

        Raises:
            UserError: settings are refused, a stage failed, or needs one that has not run.
        """
        order = [stage.name for stage in self.stages]
        selected = (selection or Selection()).of(order)
        self.check()
        self._running = True
        self.root.mkdir(parents=True, exist_ok=True)
        RunFolder.open(self.root)  # frees it of what killed processes left half-written
        with alone_in(self.root):
            self._begin()
            try:
                for stage in self.stages:
                    self._visit(stage, stage.name in selected)
            finally:
                self.store.digests.save()
                self.store.write_manifest(self.config.to_dict(), order)
        return self.store.read_manifest() or {}

    def check(self) -> None:
        """Refuse settings of any stage that its command would refuse.

        Raises:
            UserError: the first mistake.
        """
        for stage in self.stages:
            settings = replaced(stage.config, lambda reference: f"<{reference.stage}>")
            KINDS[stage.kind].check_settings(settings, f"stages.{stage.name}.config")

    def plan(self) -> list[tuple[Stage, str, Planned | None]]:
        """Every stage with its state: `done`, `to run`, or after which undecided gate it is known.

        Nothing is run or written.
        """
        self._running = False
        self._begin()
        found: list[tuple[Stage, str, Planned | None]] = []
        for stage in self.stages:
            try:
                planned = self.resolve(stage)
            except UserError as error:
                if error.code != "missing_result":
                    raise
                if stage.promotes:
                    self._undecided[stage.promotes] = stage.name
                found.append((stage, f"after {error.fields['stage']}", None))
                continue
            result = self.store.read(stage.kind, planned.address)
            if self._is_over(stage):
                found.append((stage, "skipped", planned))
                continue
            if result is not None:
                self._take(planned, result)
            elif stage.promotes and stage.kind != "gate":  # what it will promote is known
                self._take(planned, {"metrics": {}})
            elif stage.promotes:
                self._undecided[stage.promotes] = stage.name
            found.append((stage, "done" if result else "to run", planned))
        return found

    def resolve(self, stage: Stage) -> Planned:
        """Settings, paths and address of a stage; what is above it must have been visited.

        Raises:
            UserError: it refers to a stage without a result, or to a file that is not there.
        """
        kind = KINDS[stage.kind]
        upstream = {str(each): self._artefact(each) for each in references_in(stage.config)}
        settings = dict(stage.config)
        if kind.seed and kind.seed not in settings and "input" not in settings:
            settings[kind.seed] = self.config.seed
        needs = [self._artefact(Reference(name, None)).address for name in stage.needs]
        made_of = replaced(settings, lambda each: _placed(upstream[str(each)]))
        paths = replaced(settings, lambda each: self.store.path(upstream[str(each)]))
        files, judged = named_files(settings), None

        def address_of(more: dict[str, Any]) -> str:
            return self.store.address(stage.kind, made_of | more, stage.launch, files, needs)

        if stage.kind == "gate":
            gates = {"gates": [gate.to_dict() for gate in stage.gates]}
            judged, former = self._former(stage, lambda each: address_of(gates | each.settings(_placed)))
            address = address_of(gates | former.settings(_placed))
            paths |= gates | former.settings(self.store.path)
        else:
            address = address_of({})
        addresses = {name: artefact.address for name, artefact in upstream.items()}
        self._addresses[stage.name] = address
        return Planned(stage, paths, address, addresses, judged)

    def path(self, reference: Reference) -> str:
        """Where a reference leads, whether or not it is there yet.

        Raises:
            UserError: that is not known before a gate has been judged.
        """
        return self.store.path(self._artefact(reference))

    def _begin(self) -> None:
        self._addresses.clear()
        self._undecided.clear()
        self._ended.clear()
        self.store.begin(None if self.config.model is None else self.store.outside(self.config.model))

    def _visit(self, stage: Stage, selected: bool) -> None:
        entry: dict[str, Any] = {"kind": stage.kind}
        self.store.entries[stage.name] = entry
        if self._is_over(stage):
            entry["status"] = "skipped"
            self.on_event("skipped", stage.name, "a gate above ended its rounds or the pipeline")
            return
        try:
            planned = self.resolve(stage)
        except UserError as error:
            entry["status"] = "missing"
            if selected or error.code != "missing_result":
                raise
            if stage.promotes:
                self._undecided[stage.promotes] = stage.name
            return
        entry |= {"address": planned.address, "inputs": planned.upstream}
        result = self.store.read(stage.kind, planned.address)
        if result is None and not selected:
            entry["status"] = "missing"
            if stage.promotes:
                self._undecided[stage.promotes] = stage.name
            return
        if result is None:
            result = execute(planned, self.store, self.launch, self.on_event, entry)
        else:
            self.on_event("cached", stage.name, "")
        folder = self.store.relative(self.store.folder(stage.kind, planned.address))
        entry |= {"status": "done", "folder": folder}
        entry |= {key: result[key] for key in ("outputs", "metrics")}
        self._take(planned, result, decides=selected)
        self.store.write_manifest(self.config.to_dict(), [each.name for each in self.stages])

    def _take(self, planned: Planned, result: dict[str, Any], *, decides: bool = True) -> None:
        """Draw the consequences of a finished stage: promotions, rejections, loops that end, alarms.

        A stage that does not decide, as it was not selected, is what references lead to, and moves no role.
        """
        stage = planned.stage
        entry = self.store.entries.setdefault(stage.name, {})
        if stage.loop and stage.kind in ("generate", "evaluate"):
            self._watch(stage, entry, result)
        if stage.promotes is None and stage.kind != "gate":
            return
        artefact = self._promoted(stage, planned)
        if stage.kind == "gate":
            if decides and planned.judged is not None:
                self.store.judged[stage.name] = planned.judged
            outcome = result["metrics"]["outcome"]
            accepted = outcome == "pass" or (outcome == "inconclusive" and stage.on_inconclusive == "accept")
            entry["decision"] = "accepted" if accepted else "rejected"
            if not accepted:
                self._reject(planned, artefact, result["metrics"], decides)
                return
        if stage.promotes is not None:
            self._undecided.pop(stage.promotes, None)
            measured = self._artefacts(stage.config["measured"]) if stage.kind == "gate" else ()
            self.store.current[stage.promotes] = current = Current(artefact, stage.name, measured)
            if decides and self.store.promote(stage.promotes, current, planned.address) and self._running:
                self.store.log("promoted", stage.name, role=stage.promotes, path=artefact.path)
                self.on_event("promoted", stage.name, f"{stage.promotes} is now {artefact.path}")

    def _reject(self, planned: Planned, candidate: Artefact, verdict: dict[str, Any], decides: bool) -> None:
        stage = planned.stage
        if decides:
            if self._running:
                self.store.reject(stage.name, planned.address, verdict, candidate)
            if stage.promotes and verdict["outcome"] == "fail":
                self._withdraw(stage.promotes, Current(candidate, stage.name))
        if stage.promotes:
            former = self.store.accepted_before(stage.promotes, Current(candidate, stage.name))
            if former is not None:
                self._undecided.pop(stage.promotes, None)
                self.store.current[stage.promotes] = former
        self.on_event("rejected", stage.name, "; ".join(verdict["reasons"]))
        if stage.on_failure == "stop":
            self._ended.add(stage.loop or "")

    def _withdraw(self, role: str, current: Current) -> None:
        """Take a role back from a model that has shown a loss since it got it."""
        stage = current.stage or ""
        if self.store.withdraw(role, current) and self._running:
            former = self.store.held.get(role)
            path = former and former.artefact.path
            self.store.log("withdrawn", stage, role=role, path=current.artefact.path, now=path)
            if former and former.artefact == current.artefact:
                words = f"still that, which {former.stage} accepts"
            else:
                words = f"rolled back to {path}" if path else "left without a model"
            self.on_event("withdrawn", stage, f"{current.artefact.path} was promoted; {role} is {words}")

    def _watch(self, stage: Stage, entry: dict[str, Any], result: dict[str, Any]) -> None:
        """Compare the texts of a round with those of the first."""
        suffix = stage.name.removeprefix(f"{stage.loop}-{stage.round}-")
        names = [f"{stage.loop}-{number}-{suffix}" for number in range(1, stage.round or 1)]
        before = [self.store.entries.get(name, {}).get("metrics") or {} for name in names]
        alarms = [
            text
            for text in collapse_alarms([*before, result["metrics"]])
            if text.startswith(f"round {stage.round}:")
        ]
        if alarms:
            entry["alarms"] = alarms
            self.on_event("alarm", stage.name, "; ".join(alarms))

    def _promoted(self, stage: Stage, planned: Planned) -> Artefact:
        output = KINDS[stage.kind].promoted
        assert output is not None
        if output == "candidate":
            return self._artefacts(stage.config["candidate"])[0]
        folder = self.store.folder(stage.kind, planned.address)
        path = folder / KINDS[stage.kind].outputs[output]
        return Artefact(self.store.relative(path), planned.address)

    def _artefact(self, reference: Reference) -> Artefact:
        """The artefact that a reference names.

        Raises:
            UserError: it does not exist, or is not known yet.
        """
        if reference.stage == "current":
            role = reference.output or ""
            if role in self._undecided or role not in self.store.current:
                after = self._undecided.get(role)
                raise UserError(
                    f"{reference} is not known before stage {after} has run; run it first"
                    if after
                    else f"{reference}: nothing has that role yet; set model, or promote a stage above",
                    code="missing_result",
                    stage=after or role,
                )
            return self.store.current[role].artefact
        stage = next(each for each in self.stages if each.name == reference.stage)
        address = self._addresses.get(stage.name)
        entry = self.store.entries.get(stage.name, {})
        if entry.get("status") == "skipped":
            raise UserError(
                f"{reference}: stage {stage.name} was skipped, as a gate ended its rounds; refer to "
                "${current.policy} for the last model that was accepted",
                code="skipped_result",
                stage=stage.name,
            )
        if address is None or entry.get("status") == "missing":
            raise UserError(
                f"{reference}: stage {stage.name} has no result; run it first",
                code="missing_result",
                stage=stage.name,
            )
        path = self.store.folder(stage.kind, address) / KINDS[stage.kind].path_of(reference)
        return Artefact(self.store.relative(path), address)

    def _former(
        self, stage: Stage, address_of: Callable[[Former], str]
    ) -> tuple[dict[str, Any] | None, Former]:
        """The evaluations that a gate compares with as `previous`; first, what the store keeps of them.

        None and an empty `Former` if no condition compares with `previous`.
        """
        if all(gate.against != "previous" for gate in stage.gates):
            return None, Former()
        role = stage.promotes or ""
        if role in self._undecided:
            self._artefact(Reference("current", role))  # raises: not known yet
        current = self.store.current.get(role)
        measured = (current.measured if current else ()) or self._artefacts(stage.config.get("start"))
        names = [each.name for each in self.stages]
        asked = Asked(
            gate=stage.name,
            role=role,
            candidate=self._artefacts(stage.config["candidate"])[0],
            measured=self._artefacts(stage.config["measured"]),
            above=frozenset(names[: names.index(stage.name)]),
            instead=current.artefact.path if current and current.measured else "start",
            of=f"{address_of(Former(measured))} {stage.on_inconclusive}",
        )
        former = former_of(self.store, asked, Former(measured))
        return {"of": asked.of, "role": role, **former.to_dict()}, former

    def _artefacts(self, value: Any) -> tuple[Artefact, ...]:
        """The artefacts that a setting, one text or several, names: results, or paths from outside."""
        texts = value if isinstance(value, list | tuple) else [value] if value else []
        found = []
        for text in texts:
            path = replaced(text, lambda each: self.store.path(self._artefact(each)))
            inside = references_in(text)
            if inside:
                found.append(Artefact(self.store.relative(Path(path)), self._artefact(inside[0]).address))
            else:
                found.append(self.store.outside(path))
        return tuple(found)

    def _is_over(self, stage: Stage) -> bool:
        return "" in self._ended or (stage.loop is not None and stage.loop in self._ended)


def _placed(artefact: Artefact) -> str:
    """An artefact as an address has it: where it lies in its result, and the result's address."""
    inside = "/".join(Path(artefact.path).parts[2:]) if artefact.path.startswith("results") else ""
    return f"{artefact.address}:{inside}"
