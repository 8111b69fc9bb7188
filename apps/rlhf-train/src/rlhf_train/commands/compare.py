"""`rlhf-train compare`: several methods at equal budgets, a run of each for every seed, measured alike."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rlhf_algos import METHODS, rows_per_step
from rlhf_algos.process_group import world_size
from rlhf_data import (
    PromptRecord,
    RunFolder,
    UserError,
    alone_in,
    apply_overrides,
    atomic_write_json,
    remove_folder,
)
from rlhf_train.comparison.budget import PILOT_STEPS, measured_steps, spent_per_step, steps_of
from rlhf_train.comparison.plan import Arm, ComparisonPlan
from rlhf_train.display.console import make_console, progress, warning_line
from rlhf_train.inputs import check_inputs
from rlhf_train.runs import new_run, resumable, resumed_run, terminated_as_interrupted

_JOB = "compare"
_PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that a process gets when its parent ends."""
_STEPS, _PILOT, _START, _REPORT = "steps.json", "pilot", "start", "comparison"
_PROMPTS = "prompts"
"""Key of the config: how many prompts are measured, and how many of them are trained on, for the report."""
_NO_PLAN = ("resume", "output_dir")
"""Options that are not part of the plan."""


def run_compare(options: dict[str, Any]) -> None:
    """Plan, train and measure every run that is not finished, and write the report."""
    console = make_console()
    if world_size() > 1:  # each process would make its own comparison
        raise UserError(
            f"torchrun has started {world_size()} processes, and a comparison starts those of its runs "
            f"itself; leave torchrun out, and give --set distributed.trainer_workers={world_size()}",
            code="conflicting_options",
        )
    if options["resume"] is not None:
        run = resumed_run(options, _JOB, [name for name in options if name not in _NO_PLAN])
        values = run.read_config()
        values.pop(_PROMPTS, None)
        if values.pop("job", None) != _JOB:
            raise UserError(
                f"{run.path} is not the folder of a comparison; give another one with --resume",
                code="wrong_folder",
            )
        plan = ComparisonPlan.from_dict(values, where=str(run.path / "config.json"))
        context = _continued(run)
    else:
        for name in ("methods", "model", "train_data", "eval_data", "reward", "budget"):
            if not options[name]:
                shown = "METHOD METHOD ..." if name == "methods" else "--" + name.replace("_", "-")
                raise UserError(f"{shown} is missing; every method starts from one model and gets one budget")
        plan, context = ComparisonPlan.of_options(options), new_run(options, _JOB)
    prompts, shared = _checked(plan, dry_run=options["dry_run"])
    with context as run:
        _show_plan(plan, len(prompts), shared, console)
        if options["dry_run"]:
            return
        if options["resume"] is None:
            counts = {"measured": len(prompts), "trained_on": shared}
            run.write_config({"job": _JOB, **plan.to_dict(), _PROMPTS: counts})
        with resumable(run, _JOB):
            _measure_start(plan, prompts, run)
            steps = _steps(plan, run, console)
            _run_all(plan, prompts, run, steps, console)
    run.write_results({"job": _JOB, "steps": steps})
    _report(run, console)


@contextmanager
def _continued(run: RunFolder) -> Iterator[RunFolder]:
    """The folder of a resumed comparison, as a context like `new_run`."""
    with terminated_as_interrupted():
        yield run


def _checked(plan: ComparisonPlan, *, dry_run: bool) -> tuple[list[PromptRecord], int]:
    """The held-out prompts, and how many of them are trained on."""
    from rlhf_algos.jobs.data import load_rows
    from rlhf_algos.jobs.online import check_parts
    from rlhf_eval.evaluation import load_prompts, prompt_ids
    from rlhf_models import adapter_base, is_adapter, load_adapter_tokenizer, load_config, load_tokenizer

    trained: set[str] = set()
    for arm in plan.arms:
        method = METHODS[arm.method]
        rows = plan.preference_data if not method.online and plan.preference_data else plan.train_data
        values = apply_overrides({}, arm.overrides) | {"model_name_or_path": plan.model, "train_data": rows}
        if method.online:
            values["reward"] = plan.reward
        config = method.resolve(values, where=arm.name)
        check_inputs(config, dry_run=dry_run)
        check_parts(config)
        processes = config.distributed.trainer_workers if config.distributed else 0
        rows_per_step(config, processes or 1)  # refuses steps that are not of whole groups
        trained.update(map(_prompt_of, load_rows(method, config).train))
    # Refused is what an online method would refuse that trained on these prompts.
    for line in filter(None, (plan.reward[0], plan.held_out_reward)):
        measured = {"train_data": plan.eval_data, "eval_fraction": 0.0, "reward": (line,)}
        config = METHODS["grpo"].resolve({"model_name_or_path": plan.model, **measured}, where=line)
        check_inputs(config)
        check_parts(config)
        load_rows(METHODS["grpo"], config)
    prompts = load_prompts(plan.eval_data, plan.max_prompts)
    base = adapter_base(plan.model) if is_adapter(plan.model) else plan.model
    tokenizer = load_tokenizer(base) if base == plan.model else load_adapter_tokenizer(plan.model, base)
    for prompt in prompts:
        prompt_ids(tokenizer, load_config(base), prompt, plan.max_new_tokens)
    return prompts, sum(_prompt_of(prompt) in trained for prompt in prompts)


def _prompt_of(record: Any) -> str:
    """A record's prompt as JSON; of a conversation, everything before its last message."""
    from rlhf_data import prompt_key

    messages = getattr(record, "messages", None)
    return prompt_key(record) if messages is None else json.dumps(messages[:-1], sort_keys=True)


def _steps(plan: ComparisonPlan, run: RunFolder, console: Console) -> dict[str, int]:
    """Steps of each arm's runs, from a pilot of a few steps where the budget is not in steps."""
    path = run.path / _STEPS
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for arm in plan.arms:
        if arm.name in known:
            continue
        rows: list[dict[str, Any]] = []
        if plan.unit != "steps":
            console.print(f"{arm.name}: {PILOT_STEPS} steps, to see how many {plan.unit} one takes")
            folder = RunFolder(run.path / _PILOT / arm.name)
            if folder.path.exists():
                remove_folder(folder.path)
            quick = ("eval_fraction=0", "ref_kl_rows=0", "stage_samples=0", "logging_steps=1")
            settings = [part for each in quick for part in ("--set", each)]
            _train(
                [*plan.arguments(arm), *settings, *_length(PILOT_STEPS, plan.seeds[0]), *_into(folder.path)]
            )
            rows = folder.read_metrics()
        per_step = spent_per_step(rows, plan.unit)
        known[arm.name] = steps_of(plan.budget, per_step)
        atomic_write_json(path, known)
        if plan.unit != "steps":
            console.print(f"{arm.name}: {known[arm.name]} steps of {per_step:.4g} {plan.unit}")
    if (run.path / _PILOT).exists():
        remove_folder(run.path / _PILOT)
    return known


def _run_all(
    plan: ComparisonPlan,
    prompts: Sequence[PromptRecord],
    run: RunFolder,
    steps: Mapping[str, int],
    console: Console,
) -> None:
    """Train and measure every run; a run that fails does not stop the others."""
    failed = []
    for arm, seed, folder in plan.folders(run.path):
        try:
            _run_arm(plan, arm, seed, folder, steps[arm.name], console)
        except UserError as error:
            console.print(warning_line(f"{error}; the other runs go on"))
            failed.append(f"{arm.name}, seed {seed}")
        else:
            _measure(plan, prompts, run, folder, steps[arm.name])
    if failed:
        count = len(plan.arms) * len(plan.seeds)
        hint = f"try again with rlhf-train {_JOB} --resume {run.path}"
        if len(failed) < count:
            hint = f"the others are finished: {hint}, or compare these with rlhf-report {_JOB} {run.path}"
        raise UserError(
            f"{len(failed)} of {count} runs failed ({'; '.join(failed)}), see their messages above; {hint}"
        )


def _run_arm(plan: ComparisonPlan, arm: Arm, seed: int, folder: Path, steps: int, console: Console) -> None:
    """Train one run, or continue it; nothing if it is finished."""
    run = RunFolder(folder)
    if folder.exists() and run.read_results() is not None:
        return
    console.print(f"\n[bold]{arm.name}, seed {seed}[/bold]")
    if (folder / "config.json").exists():
        _train([arm.method, "--resume", str(folder)])
        return
    if folder.exists():  # killed before it began, perhaps while training processes came up
        with alone_in(folder):
            remove_folder(folder)
    saved = [
        "--set",
        f"save_steps={measured_steps(steps, plan.evaluations)[0]}",
        "--set",
        "save_total_limit=null",
    ]
    _train([*plan.arguments(arm), *saved, *_length(steps, seed), *_into(folder)])


def _train(arguments: Sequence[str]) -> None:
    """Run `rlhf-train` in a separate process, whose memory is then its method's alone."""
    command = [sys.executable, "-m", "rlhf_train", *arguments]
    # Signals come from here, once.
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=_end_with_parent)
    try:
        code = process.wait()
    except BaseException:
        process.terminate()  # ends its step with a checkpoint
        process.wait()
        raise
    if code:
        how = f"ended with exit code {code}" if code > 0 else f"was ended by signal {-code}"
        raise UserError(f"rlhf-train {arguments[0]} {how}; see its output above")


def _end_with_parent() -> None:
    """Have Linux send SIGTERM to this process when its parent ends, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _measure_start(plan: ComparisonPlan, prompts: Sequence[PromptRecord], run: RunFolder) -> None:
    """Measure the start model before anything is trained, so that a failing reward fails now."""
    from rlhf_train.comparison.policies import PolicyMeter

    if run.read_results() is None:
        PolicyMeter(plan, prompts, run.path / _START, progress).measure_start()


def _measure(
    plan: ComparisonPlan, prompts: Sequence[PromptRecord], run: RunFolder, folder: Path, steps: int
) -> None:
    """Measure one run's policies; the models are freed on return, so that the next run has the memory."""
    from rlhf_train.comparison.policies import PolicyMeter, is_measured

    measured = measured_steps(steps, plan.evaluations)
    if is_measured(RunFolder(folder), measured):
        return
    meter = PolicyMeter(plan, prompts, run.path / _START, progress)
    meter.measure_run(RunFolder(folder), measured)


def _report(run: RunFolder, console: Console) -> None:
    """Write the page of `rlhf-report compare`; print how to install it if it is missing."""
    command = ["compare", str(run.path), "--output-dir", str(run.path / _REPORT)]
    if importlib.util.find_spec("rlhf_report") is None:
        console.print(f"pip install rlhf-report, and then: rlhf-report {' '.join(command)}")
        return
    if subprocess.run([sys.executable, "-m", "rlhf_report", *command], check=False).returncode:
        raise UserError(f"the report was not written; try again: rlhf-report {' '.join(command)}")


def _show_plan(plan: ComparisonPlan, prompts: int, shared: int, console: Console) -> None:
    columns, title = ("method", "settings", "seeds", "each"), f"{len(plan.arms) * len(plan.seeds)} runs"
    table = Table(*columns, title=title, title_justify="left", box=box.ROUNDED)
    for arm in plan.arms:
        settings = " ".join(arm.overrides) or "defaults"
        table.add_row(arm.name, settings, ", ".join(map(str, plan.seeds)), f"{plan.budget:,.10g} {plan.unit}")
    console.print(table)
    console.print(
        f"All start from {plan.model} and are measured on {prompts} prompts of {plan.eval_data}, "
        f"{plan.evaluations} times on their way."
    )
    if shared:
        console.print(
            warning_line(
                f"{shared} of these {prompts} prompts are also trained on, so what is measured is too good; "
                "give others with --eval-data"
            )
        )


def _length(steps: int, seed: int) -> list[str]:
    return ["--max-steps", str(steps), "--seed", str(seed)]


def _into(folder: Path) -> list[str]:
    return ["--output-dir", str(folder)]
