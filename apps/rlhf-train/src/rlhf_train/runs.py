"""Run folders as the commands treat them: made, resumed, and removed if nothing began."""

from __future__ import annotations

import shlex
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from rlhf_algos.process_group import broadcast, is_main_process
from rlhf_data import RunFolder, UserError, alone_in, load_config_file, newest_unfinished
from rlhf_train.options import NEWEST, flag_of

ROOT = "outputs"
_CONFIG = "config.json"
_FILES = (_CONFIG, "before.json", "preflight.json", "samples.jsonl", "workers.jsonl", "rollouts.ledger")
"""Files written before the first step."""
_BASE = "base"


@contextmanager
def new_run(options: dict[str, Any], job: str) -> Iterator[RunFolder]:
    """The folder of a new run; removed again when the run was refused before it began.

    Of the options, `output_dir` and `dry_run` are read; without `output_dir` the folder is named after the
    job. A dry run leaves no folder, but its name is checked as for any run.
    """
    named = options["output_dir"]
    if options["dry_run"]:
        with terminated_as_interrupted():
            yield _planned(named, job)
        return
    existed = named is not None and Path(named).is_dir()
    run = RunFolder.create(named, job=job, root=ROOT)
    with alone_in(run.path), terminated_as_interrupted() as ignore_signal:
        refused = False
        try:
            yield run
        except UserError:
            refused = True
            raise
        except KeyboardInterrupt:
            refused = not (run.path / _CONFIG).exists()
            raise
        finally:
            if refused:
                ignore_signal()
                _remove_unstarted(run.path, keep=existed)
                if named is None:
                    with suppress(OSError):  # where earlier runs lie in it
                        Path(ROOT).rmdir()


def _planned(named: str | None, job: str) -> RunFolder:
    """The folder that a run would have: made as a check, and removed with all parents made for it."""
    inmost = Path(ROOT) if named is None else Path(named)
    made = [folder for folder in (inmost, *inmost.parents) if not folder.exists()]
    try:
        run = RunFolder.create(named, job=job, root=ROOT)
        if named is None:
            made.insert(0, run.path)
        with alone_in(run.path):
            return run
    finally:
        for folder in made:
            with suppress(OSError):  # it was not made after all, or another process has put something in it
                folder.rmdir()


@contextmanager
def run_of_all(options: dict[str, Any], job: str) -> Iterator[RunFolder]:
    """The new run's folder, which the first process makes; see `new_run`."""
    if is_main_process():
        with ExitStack() as stack:
            try:
                run = stack.enter_context(new_run(options, job))
            except UserError:
                broadcast(None)  # the others would wait for ever
                raise
            broadcast(str(run.path))
            yield run
    else:
        path = broadcast(None)
        if path is None:
            raise UserError("the first process refuses the run; its message says why")
        yield RunFolder(path)


def other_workers(
    options: dict[str, Any], values: dict[str, Any], sampling: dict[str, Any] | None
) -> dict[str, Any]:
    """Settings of `--distributed` for a resumed run; refused if they would change what it computes.

    `sampling` is the section of the run's settings that has `prompts_per_batch`; None where none are sampled.
    """
    if not options.get("distributed"):
        return {}
    given, before = load_config_file(options["distributed"]), values.get("distributed") or {}
    if sampling is None:
        return {"distributed": given}
    ahead, was = given.get("max_staleness", 0), before.get("max_staleness", 0)
    if ahead != was:
        raise UserError(
            f"--distributed {options['distributed']} has max_staleness {ahead}, and the run was begun with "
            f"{was}, which its results depend on; set it to {was}",
            code="conflicting_options",
        )
    if _on_workers(given) != _on_workers(before) and not sampling.get("prompts_per_batch"):
        raise UserError(
            f"--distributed {options['distributed']} has rollout workers and the run was begun without, or "
            "the other way round: without workers a step's prompts are sampled together, with them not; "
            "leave it out (a run with prompts_per_batch set can be moved)",
            code="conflicting_options",
        )
    return {"distributed": given}


def _on_workers(distributed: dict[str, Any]) -> bool:
    """Whether the unchecked settings of `distributed` have rollout workers."""
    return bool(distributed and distributed.get("rollout_workers", not distributed.get("trainer_workers")))


def resumed_run(options: dict[str, Any], job: str, changing: Sequence[str]) -> RunFolder:
    """The run to continue.

    Args:
        options: those of the command; `resume` and `output_dir` name the folder.
        job: its newest unfinished run is taken if neither names a folder.
        changing: names of the options that would change the run's settings, and so are refused.

    Raises:
        UserError: an option of `changing` is given, the two folders differ, or the run does not exist.
    """
    given = [name for name in changing if not any(options.get(name) is x for x in (None, False, ()))]
    if given:
        names = ", ".join(flag_of(name) for name in given)
        raise UserError(
            f"{names} cannot be combined with --resume, which keeps the run's own settings; leave it out",
            code="conflicting_options",
        )
    named, output = options["resume"], options["output_dir"]
    if named != NEWEST and output is not None and Path(named) != Path(output):
        raise UserError(
            f"--resume {named} and --output-dir {output} name two folders; leave one out",
            code="conflicting_options",
        )
    folder = output if named == NEWEST else named
    if folder is not None:
        return RunFolder.open(folder)
    run = newest_unfinished(ROOT, job)
    if run is None:
        raise UserError(
            f"there is no unfinished run under {ROOT}/; name its folder: --resume DIR",
            code="no_whole_checkpoint",
        )
    return run


@contextmanager
def resumable(run: RunFolder, job: str, *, trains: bool = True) -> Iterator[None]:
    """Within this context, an interruption gets a note with the command that continues the run.

    So does a `UserError` after a new checkpoint, such as that of a judge that no longer replies.  `trains`
    locks the folder, so that no other process trains in it meanwhile.
    """
    before = run.checkpoints()
    try:
        with alone_in(run.path) if trains and is_main_process() else nullcontext():
            yield
    except (KeyboardInterrupt, UserError) as stop:
        interrupted = isinstance(stop, KeyboardInterrupt) and (run.path / _CONFIG).exists()
        if interrupted or run.checkpoints() != before:
            stop.add_note(f"continue with: rlhf-train {job} --resume {shlex.quote(str(run.path))}")
        raise


def checkpoint_to_evaluate(run: RunFolder) -> Path:
    """The last checkpoint of a run."""
    checkpoint = run.latest_checkpoint()
    if checkpoint is None:
        raise UserError(
            f"{run.path} has no checkpoint to evaluate; train it first", code="no_whole_checkpoint"
        )
    return checkpoint


class _Terminated(KeyboardInterrupt):
    """SIGTERM was received; the process exits with `exit_code`."""

    exit_code = 128 + signal.SIGTERM


@contextmanager
def terminated_as_interrupted() -> Iterator[Callable[[], Any]]:
    """Within this context SIGTERM raises `KeyboardInterrupt` with exit code 143.

    Yields a function after which SIGTERM is ignored: when one process refuses a run, torchrun sends SIGTERM
    to the others, among them the one that removes the folder.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield lambda: None
        return
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield partial(signal.signal, signal.SIGTERM, signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _remove_unstarted(folder: Path, *, keep: bool) -> None:
    """Remove a run folder that only has files written before the first step; `keep` leaves it, empty."""
    if any(path.name not in (*_FILES, _BASE) for path in folder.iterdir()):
        return
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)
    if (folder / _BASE).exists():
        shutil.rmtree(folder / _BASE)
    if not keep:
        folder.rmdir()
