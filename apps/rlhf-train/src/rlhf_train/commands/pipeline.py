"""`rlhf-train pipeline`: from options to a pipeline that is planned or run."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rlhf_algos import METHODS
from rlhf_algos.pipeline import (
    Pipeline,
    PipelineConfig,
    Reference,
    Selection,
    Stage,
    check_ratings,
    references_in,
    replaced,
)
from rlhf_algos.pipeline.results import HISTORY
from rlhf_algos.pipeline.times import in_words, seconds_last_time
from rlhf_data import RunFolder, UserError, apply_overrides, atomic_write_json, load_config_file
from rlhf_train.commands.pipeline_inputs import check_stage
from rlhf_train.display.console import make_console
from rlhf_train.options import settings_source
from rlhf_train.runs import ROOT, resumed_run

_JOB = "pipeline"
_STARTED = ".started.json"
"""In the pipeline's folder: where that lay, and the working directory, when the pipeline was started."""
_STYLES = {
    "rejected": "bold red",
    "promoted": "bold green",
    "alarm": "bold yellow",
    "changed": "bold yellow",
    "failed": "bold red",
}
_STAND_IN = "non_empty"
"""A rule that needs nothing, in place of a reward model that is not trained yet."""


def run_pipeline(options: dict[str, Any]) -> bool:
    """Plan or run; whether a gate has ended the pipeline."""
    values, root = _values(options)
    directory = _started_in(root) if options["config"] is None else None
    if directory is None:
        return _plan_or_run(options, values, root)
    root = root.absolute()
    with contextlib.chdir(directory):
        return _plan_or_run(options, values, root)


def _plan_or_run(options: dict[str, Any], values: dict[str, Any], root: Path) -> bool:
    """Plan or run in the directory that the settings' paths are meant from."""
    console = make_console()
    resumed = options["config"] is None
    source = str(root / "config.json") if resumed else settings_source("", options, {})
    config = PipelineConfig.from_dict(values, where=source)
    selection = Selection(tuple(options["stage"]), options["from_stage"], options["until"])

    def say(event: str, stage: str, text: str) -> None:
        console.print(Text.assemble((f"{event:9} ", _STYLES.get(event, "")), f"{stage}  {text}"))

    pipeline = Pipeline(config, root, on_event=say)
    if options["price_per_hour"] is not None and not options["dry_run"]:
        raise UserError("--price-per-hour is for --dry-run; give both", code="conflicting_options")
    if options["dry_run"]:
        _dry_run(pipeline, selection, console, options["price_per_hour"])
        return False
    selection.of([stage.name for stage in pipeline.stages])
    pipeline.check()
    _open(root)
    RunFolder(root).write_config({"job": _JOB, **config.to_dict()})
    if not resumed:
        atomic_write_json(root / _STARTED, {"directory": os.getcwd(), "folder": str(root.absolute())})
    try:
        pipeline.run(selection)
    except KeyboardInterrupt as stop:
        stop.add_note(f"continue with: rlhf-train {_JOB} --resume {shlex.quote(str(root))}")
        raise
    finally:
        if pipeline.store.entries:
            from rlhf_algos.pipeline.page import write_page

            write_page(root)
    _show(pipeline, console)
    return pipeline.stopped


def _values(options: dict[str, Any]) -> tuple[dict[str, Any], Path]:
    """The settings, and the folder of the pipeline."""
    if options["resume"] is not None:
        run = resumed_run(options, _JOB, ("config", "overrides"))
        values = run.read_config()
        if values.pop("job", None) != _JOB:
            raise UserError(
                f"{run.path} is not the folder of a pipeline; give another one with --resume",
                code="wrong_folder",
            )
        return values, run.path
    if options["config"] is None:
        raise UserError(
            "--config is missing; name a file with stages, such as configs/pipeline.yaml",
            code="missing_option",
            option="config",
        )
    values = load_config_file(options["config"])
    values = apply_overrides({k: v for k, v in values.items() if k != "job"}, options["overrides"])
    default = Path(ROOT) / f"{_JOB}-{Path(options['config']).stem}"
    return values, Path(options["output_dir"] or default)


def _started_in(root: Path) -> Path | None:
    """The directory in which a pipeline was started, which its relative paths are meant from.

    None where that is gone or not known, or the pipeline's folder was moved or copied since: then they are
    meant from the working directory.
    """
    try:
        known = json.loads((root / _STARTED).read_text(encoding="utf-8"))
        directory, folder = Path(known["directory"]), Path(known["folder"])
        return directory if directory.is_dir() and folder.samefile(root) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _open(root: Path) -> None:
    """Make the folder, or reopen that of an earlier run."""
    config = root / "config.json"
    if config.is_file():
        try:
            known = json.loads(config.read_text(encoding="utf-8")).get("job") == _JOB
        except ValueError:
            known = False
        if known:
            return
    RunFolder.create(root, job=_JOB, resumable=False)


def _show(pipeline: Pipeline, console: Console) -> None:
    """Print the status of every stage, and where its results are."""
    columns = (Column(name, overflow="fold") for name in ("stage", "kind", "status", "result"))
    table = Table(*columns, box=box.ROUNDED)
    for name, entry in pipeline.store.entries.items():
        status = entry.get("decision") or entry.get("status", "")
        table.add_row(name, entry["kind"], status, entry.get("folder", ""))
    console.print(table)
    for role, current in sorted(pipeline.store.held.items()):
        console.print(Text(f"current {role}: {pipeline.store.path(current.artefact)}", overflow="fold"))
    console.print(Text(f"written to {pipeline.root}; see {pipeline.root / 'pipeline.html'}", overflow="fold"))


def _dry_run(pipeline: Pipeline, selection: Selection, console: Console, price: float | None) -> None:
    """Check every stage, plan the trainings that would run, and show what each stage would take."""
    pipeline.check()
    plan = pipeline.plan()
    selected = selection.of([stage.name for stage, _, _ in plan])
    history = RunFolder(pipeline.root).read_lines(HISTORY)
    rows: list[_Row] = []
    with tempfile.TemporaryDirectory() as folder:
        stand_ins = _StandIns(pipeline, Path(folder))
        for stage, state, _ in plan:
            row = _Row(stage, state if stage.name in selected else f"{state}, not selected")
            if state not in ("done", "skipped") and stage.name in selected:
                check_stage(stage)
                row.memory, row.seconds = _plan_stage(stage, stand_ins)
                last = seconds_last_time(history, stage.name)
                row.seconds = row.seconds if last is None else last
                row.runs = True
                if stage.kind == "gate":
                    check_ratings(stage.config)
            rows.append(row)
    _show_plan(rows, console, price)


@dataclass
class _Row:
    """A stage's estimated cost, as far as it is known: seconds, and bytes of each process."""

    stage: Stage
    state: str
    runs: bool = False
    seconds: float | None = None
    memory: float | None = None


def _show_plan(rows: Sequence[_Row], console: Console, price: float | None) -> None:
    """The table of a dry run, and what all of it takes."""
    from rlhf_models import format_bytes

    costs = () if price is None else ("cost",)
    names = ("stage", "kind", "state", "launched by", "needs", "time", "memory", *costs)
    columns = (Column(name, overflow="fold") for name in names)
    table = Table(*columns, title="Dry run: nothing is run", title_justify="left", box=box.ROUNDED)
    for row in rows:
        launch = row.stage.launch
        by = f"torchrun, {launch} processes" if isinstance(launch, int) else launch or "one process"
        needs = ", ".join(map(str, references_in(row.stage.config)))
        time = in_words(row.seconds) or ("not known" if row.runs else "")
        memory = "" if row.memory is None else format_bytes(row.memory)
        cost = [] if price is None else [_cost(row.seconds, price)]
        table.add_row(row.stage.name, row.stage.kind, row.state, by, needs, time, memory, *cost)
    console.print(table)
    known = [row.seconds for row in rows if row.seconds is not None]
    unknown = sum(row.runs and row.seconds is None for row in rows)
    if not any(row.runs for row in rows):
        console.print("nothing is left to run")
        return
    all_of_it = f"about {in_words(sum(known))}" if known else "a time that is not known"
    cost = f", which costs {_cost(sum(known), price)}" if price is not None and known else ""
    more = (
        f", without {unknown} stage{'s' * (unknown > 1)} whose time is not known" if known and unknown else ""
    )
    console.print(Text(f"all that would run takes {all_of_it}{cost}{more}"))
    if known:
        console.print(
            Text(
                "times are those of a stage's last run in this folder; of trainings that have not run, those "
                "of a few steps on this machine, without the start of the process"
            )
        )


def _cost(seconds: float | None, price: float) -> str:
    return "" if seconds is None else f"{seconds / 3600 * price:.2f}"


def _plan_stage(stage: Stage, stand_ins: _StandIns) -> tuple[float | None, float | None]:
    """Check the settings of a training or a game, and print its plan; its bytes and seconds, if known."""
    from rlhf_train.display.training import TrainingDisplay

    if stage.kind == "minmax":
        from rlhf_minmax import MinMaxConfig

        MinMaxConfig.from_dict(replaced(stage.config, stand_ins.path), where=f"stages.{stage.name}.config")
    if stage.kind not in METHODS:
        return None, None
    from rlhf_algos import plan_machine, plan_training
    from rlhf_algos.parallel.memory_plan import peak_of
    from rlhf_algos.pipeline.times import time_training
    from rlhf_algos.process_group import world_size
    from rlhf_train.inputs import check_inputs

    with TrainingDisplay() as display:
        display.stage(stage.name)
        settings = stand_ins.settings(stage)
        if settings is None:
            display.say("its rows are made by a stage that has not run; it is planned once that is done")
            return None, None
        config = METHODS[stage.kind].resolve(settings, where=f"stages.{stage.name}.config")
        check_inputs(config)
        processes = stage.launch if isinstance(stage.launch, int) else world_size()
        plan = plan_training(stage.kind, config, plan_machine(processes, None))
        display.show_plan(plan)
    one = stage.launch is None and processes == 1
    return peak_of(plan["memory"]), time_training(stage.kind, config, plan) if one else None


class _StandIns:
    """Settings of stages in a dry run, with something in place of what is not there yet.

    A model that is not trained yet is planned as the one that its own training starts from, a reward model as
    a rule, and example rows are written into a temporary folder.
    """

    def __init__(self, pipeline: Pipeline, folder: Path) -> None:
        self.pipeline, self.folder = pipeline, folder
        self.by_name = {stage.name: stage for stage in pipeline.stages}

    def settings(self, stage: Stage) -> dict[str, Any] | None:
        """Settings that a training can be planned with; None where its rows are not there yet."""
        settings = dict(stage.config)
        start = references_in(settings.get("model_name_or_path"))
        if start and not Path(self.path(start[0])).exists():
            settings.pop("model_name_or_path")
            settings |= self._start(start[0])
        lines = settings.get("reward")
        if lines is not None:
            each = lines if isinstance(lines, list) else [lines]
            settings["reward"] = [
                _STAND_IN if any(not Path(self.path(r)).exists() for r in references_in(line)) else line
                for line in each
            ]
        for key in ("train_data", "eval_data"):
            if any(not Path(self.path(each)).exists() for each in references_in(settings.get(key))):
                return None
        return replaced(settings, self.path)

    def path(self, reference: Reference) -> str:
        """Where a reference leads, or would lead."""
        if reference.stage == "current":
            current = self.pipeline.store.current.get(reference.output or "")
            return self.pipeline.store.path(current.artefact) if current else str(reference)
        try:
            path = self.pipeline.path(reference)
        except UserError:
            return str(reference)
        stage = self.by_name[reference.stage]
        if stage.kind == "data" and not Path(path).exists() and "input" not in stage.config:
            rows = self.folder / stage.name
            if not rows.exists():
                from rlhf_data import write_dummy_data

                given = {"world": "story", "rows": 256, "seed": self.pipeline.config.seed, **stage.config}
                write_dummy_data(rows, given["rows"], kind=given["world"], seed=given["seed"])
            return str(rows / f"{reference.output}.jsonl")
        return path

    def _start(self, reference: Reference) -> dict[str, Any]:
        """The model that the training behind a reference starts from."""
        stage = self.by_name.get(reference.stage)
        if stage is None:  # what is current is not known yet: the model that the pipeline begins with
            model = self.pipeline.config.model
            return {"model_name_or_path": model} if model else {}
        start = references_in(stage.config.get("model_name_or_path"))
        if start:
            return self._start(start[0])
        keys = ("model_name_or_path", "model_config")
        return {key: stage.config[key] for key in keys if key in stage.config}
