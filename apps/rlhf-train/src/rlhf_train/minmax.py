"""`rlhf-train minmax`: from options to a job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlhf_data import RunFolder, UserError, apply_overrides, load_config_file
from rlhf_data.run_folder import newest_unfinished
from rlhf_minmax import MinMaxConfig
from rlhf_train.cli import NEWEST

_ROOT = "outputs"
_KEY_OF_OPTION = {
    "reward_model": ("reward_model.model_name",),
    "judge_model": ("judge_model.model_name",),
    "model": ("policy_model.model_name", "monitor_model.model_name"),
    "train_data": ("data.train_data",),
    "eval_data": ("data.eval_data",),
    "max_steps": ("training.max_steps",),
    "epochs": ("training.num_epochs",),
    "seed": ("seed",),
}
_CHANGES_A_RUN = (*_KEY_OF_OPTION, "config", "overrides", "no_baseline", "dry_run")
_FLAG_OF = {"overrides": "--set"}


def run_minmax(options: dict[str, Any]) -> None:
    """Resolve the settings, open the run folder, and play, evaluate or plan.

    Raises:
        UserError: options, settings or data cannot be used.
    """
    if options["resume"] is not None:
        run = _resumed_run(options)
        config = MinMaxConfig.from_dict(run.read_config(), where=str(run.path / "config.json"))
        _play(config, run, options)
        return
    config = resolve_config(options)
    with _new_run(options) as run:
        if options["dry_run"]:
            from rlhf_minmax.dry_run import plan_run
            from rlhf_train.display import show_plan

            show_plan(plan_run(config))
        else:
            _play(config, run, options)


def resolve_config(options: dict[str, Any]) -> MinMaxConfig:
    """The settings: the config file, then `--set`, then the options, each over the one before.

    Raises:
        UserError: an unknown key, a value out of range, a file that cannot be read.
    """
    source = options["config"]
    values = load_config_file(source) if source else {}
    values = apply_overrides(values, options["overrides"])
    for option, keys in _KEY_OF_OPTION.items():
        if options[option] is not None:
            for key in keys:
                section, _, name = key.rpartition(".")
                values = {**values, **_nested(values, section, name, options[option])}
    if options["no_baseline"]:
        values["baseline"] = False
    if options["epochs"] is not None and options["max_steps"] is None:
        values["training"] = {**values.get("training", {}), "max_steps": -1}
    return MinMaxConfig.from_dict(values, where=str(source) if source else "config")


def _nested(values: dict[str, Any], section: str, name: str, value: Any) -> dict[str, Any]:
    if not section:
        return {name: value}
    inner = values.get(section) or {}
    if not isinstance(inner, dict):
        raise UserError(f"{section} is {inner!r} in the config file, expected a section of keys and values")
    return {section: {**inner, name: value}}


def _play(config: MinMaxConfig, run: RunFolder, options: dict[str, Any]) -> None:
    from rlhf_minmax import MinMaxJob  # late, so that mistakes in the settings are answered at once
    from rlhf_train.display import ConsoleEvents

    events = ConsoleEvents()
    job = MinMaxJob(config, run, events, rebuild_demo=options["rebuild_demo"])
    resume = options["resume"] is not None
    with events:
        if options["eval_only"]:
            checkpoint = run.latest_checkpoint() if resume else None
            if resume and checkpoint is None:
                raise UserError(f"{run.path} has no checkpoint to evaluate; train it first")
            results = job.evaluate_only(checkpoint=checkpoint)
        else:
            results = job.play(resume=resume)
    events.show_results(results, run)


@contextmanager
def _new_run(options: dict[str, Any]) -> Iterator[RunFolder]:
    """The folder of a new run; removed again when the run was only planned or refused before it began."""
    named = options["output_dir"]
    existed = named is not None and Path(named).is_dir()
    run = RunFolder.create(named, job="minmax", root=_ROOT)
    refused = options["dry_run"]
    try:
        yield run
    except UserError:
        refused = True
        raise
    finally:
        if refused:
            _remove_unstarted(run.path, keep=existed)
            if named is None:
                with suppress(OSError):  # where earlier runs lie in it
                    Path(_ROOT).rmdir()


def _remove_unstarted(folder: Path, *, keep: bool) -> None:
    """Remove a run folder that holds nothing but its config; a folder the user made stays, empty."""
    config = folder / "config.json"
    if any(path != config for path in folder.iterdir()):
        return
    config.unlink(missing_ok=True)
    if not keep:
        folder.rmdir()


def _resumed_run(options: dict[str, Any]) -> RunFolder:
    """The run to continue; options that would change its settings are refused."""
    changing = [name for name in _CHANGES_A_RUN if not any(options[name] is x for x in (None, False, ()))]
    if changing:
        names = ", ".join(_FLAG_OF.get(name, f"--{name.replace('_', '-')}") for name in changing)
        raise UserError(
            f"{names} cannot be combined with --resume, which keeps the run's own settings; leave it out"
        )
    named, output = options["resume"], options["output_dir"]
    if named != NEWEST and output is not None and Path(named) != Path(output):
        raise UserError(f"--resume {named} and --output-dir {output} name two folders; leave one out")
    folder = output if named == NEWEST else named
    if folder is not None:
        return RunFolder.open(folder)
    run = newest_unfinished(_ROOT, "minmax")
    if run is None:
        raise UserError(f"there is no unfinished run under {_ROOT}/; name its folder: --resume DIR")
    return run
