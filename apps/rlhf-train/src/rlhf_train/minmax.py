"""`rlhf-train minmax`: from options to a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_data import RunFolder, UserError, apply_overrides, load_config_file
from rlhf_data.run_folder import newest_unfinished
from rlhf_minmax import MinMaxConfig, MinMaxJob

from rlhf_train.cli import resume_folder
from rlhf_train.display import ConsoleEvents

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


def run_minmax(options: dict[str, Any]) -> None:
    """Resolve the settings, open the run folder, and play, evaluate or plan.

    Raises:
        UserError: options, settings or data cannot be used.
    """
    if options["resume"] is not None:
        run, config = _resumed(options)
    else:
        config = resolve_config(options)
        if options["dry_run"]:
            _dry_run(config)
            return
        run = RunFolder.create(options["output_dir"], job="minmax")
    events = ConsoleEvents()
    job = MinMaxJob(config, run, events, rebuild_demo=options["rebuild_demo"])
    with events:
        if options["eval_only"]:
            checkpoint = run.latest_checkpoint() if options["resume"] else None
            if options["resume"] and checkpoint is None:
                raise UserError(f"{run.path} has no checkpoint to evaluate; train it first")
            results = job.evaluate_only(checkpoint=checkpoint)
        else:
            results = job.play(resume=options["resume"] is not None)
    events.show_results(results, run)


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


def _resumed(options: dict[str, Any]) -> tuple[RunFolder, MinMaxConfig]:
    """The run to continue and its own settings; any option that would change them is refused."""
    changing = [name for name in (*_KEY_OF_OPTION, "config", "no_baseline", "dry_run") if options[name]]
    if changing or options["overrides"]:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in changing) or "--set"
        raise UserError(
            f"{names} cannot be combined with --resume, which keeps the run's own settings; leave it out"
        )
    folder = resume_folder(options)
    run = RunFolder.open(folder) if folder else newest_unfinished("outputs", "minmax")
    if run is None:
        raise UserError("there is no unfinished run under outputs/; name its folder: --resume DIR")
    return run, MinMaxConfig.from_dict(run.read_config(), where=str(Path(run.path) / "config.json"))


def _dry_run(config: MinMaxConfig) -> None:
    from rlhf_minmax.dry_run import plan_run

    from rlhf_train.display import show_plan

    show_plan(plan_run(config))
