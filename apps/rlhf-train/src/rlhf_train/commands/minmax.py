"""`rlhf-train minmax`: from options to a job."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

from rlhf_algos import trainers
from rlhf_algos.process_group import is_main_process
from rlhf_data import RunFolder, UserError, apply_overrides, load_config_file
from rlhf_minmax import MinMaxConfig
from rlhf_train.inputs import check_inputs, check_planned
from rlhf_train.options import NEWEST, settings_source
from rlhf_train.runs import checkpoint_to_evaluate, other_workers, resumable, resumed_run, run_of_all
from rlhf_train.trainers import processes_of, train_on_cluster

_JOB = "minmax"
_KEY_OF_OPTION = {
    "reward_model": ("reward_model.model_name",),
    "judge_model": ("judge_model.model_name",),
    "model": ("policy_model.model_name", "monitor_model.model_name"),
    "policy": ("policy_model.model_name",),
    "monitor": ("monitor_model.model_name",),
    "train_data": ("data.train_data",),
    "eval_data": ("data.eval_data",),
    "max_steps": ("training.max_steps",),
    "epochs": ("training.num_epochs",),
    "on_bad_row": ("data.on_bad_row",),
    "seed": ("seed",),
}
_SETS = {**_KEY_OF_OPTION, "no_baseline": ("baseline",), "force": ("force",), "quick": ("demo.prebuilt",)}
_CHANGES_A_RUN = (*_KEY_OF_OPTION, "config", "overrides", "no_baseline", "force", "quick", "dry_run")
_QUICK = {"demo.prebuilt": True, "training.max_steps": 40, "data.eval_stories": 256}
"""Settings of `--quick`, which `--set` and other options change."""


def run_minmax(options: dict[str, Any]) -> None:
    """Resolve the settings, open the run folder, and play, evaluate or plan."""
    check_planned(options)
    if options["resume"] is not None:
        run = resumed_run(options, _JOB, _CHANGES_A_RUN)
        values = run.read_config()
        training = values.get("training")
        values |= other_workers(options, values, training if isinstance(training, dict) else {})
        config = MinMaxConfig.from_dict(values, where=str(run.path / "config.json"))
        _check(config, run)
        _begin(config, run, options)
        return
    config = resolve_config(options)
    if config.demo.prebuilt and options["rebuild_demo"]:
        raise UserError(
            "--rebuild-demo builds models, and --quick (demo.prebuilt) takes those of the package; leave out "
            "one",
            code="conflicting_options",
        )
    with run_of_all(options, _JOB) as run:
        _check(config, run, dry_run=options["dry_run"])
        if not options["dry_run"]:
            _begin(config, run, options)
            return
        from rlhf_algos import plan_machine
        from rlhf_minmax import plan_run
        from rlhf_train.display.training import TrainingDisplay

        plan = plan_run(config, plan_machine(options["processes"] or processes_of(config), options["gpu"]))
        rows = [*plan["rows"], ("output folder", str(run.path))]
        TrainingDisplay(quiet=not is_main_process()).show_plan({**plan, "rows": rows})


def resolve_config(options: dict[str, Any]) -> MinMaxConfig:
    """The settings: the config file, `--quick`, `--set`, then the options, each over the one before."""
    source = options["config"]
    values = load_config_file(source) if source else {}
    if options["distributed"]:
        values["distributed"] = load_config_file(options["distributed"])
    if options["quick"]:
        for key, value in _QUICK.items():
            _put(values, key, value)
    values = apply_overrides(values, options["overrides"])
    for option, keys in _KEY_OF_OPTION.items():
        if options[option] is not None:
            for key in keys:
                _put(values, key, options[option])
    if options["no_baseline"]:
        values["baseline"] = False
    if options["force"]:
        values["force"] = True
    if options["epochs"] is not None and options["max_steps"] is None:
        _put(values, "training.max_steps", -1)
    return MinMaxConfig.from_dict(values, where=settings_source("minmax", options, _SETS))


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a value, or one of a section; what should be a section and is not is left, and refused later."""
    section, _, name = key.rpartition(".")
    if not section:
        values[name] = value
    elif isinstance(inner := values.get(section) or {}, dict):
        values[section] = {**inner, name: value}


def _check(config: MinMaxConfig, run: RunFolder, *, dry_run: bool = False) -> None:
    from rlhf_train.display.training import TrainingDisplay

    model = config.policy_model.model_name or "a tiny model"
    with TrainingDisplay(quiet=not is_main_process()) as display:
        display.say(
            f"rlhf-train {_JOB}: {model} on {config.data.train_data or 'embedded rows'}, into {run.path}"
        )
        check_inputs(config, dry_run=dry_run)


def _begin(config: MinMaxConfig, run: RunFolder, options: dict[str, Any]) -> None:
    """Play or evaluate in this process, or in training processes on a cluster."""
    cluster = trainers(config)
    if cluster is None:
        _play(config, run, options)
        return
    from rlhf_minmax.game.stories import load_stories
    from rlhf_minmax.run.distributed import check_built
    from rlhf_minmax.scorers.loading import needs_demo

    if needs_demo(config):
        check_built(config, load_stories(config), processes=cluster.trainer_workers)
    work = partial(_in_trainer, config.to_dict(), str(run.path.resolve()), options)
    train_on_cluster(cluster, config, run, work, job=_JOB, trains=not options["eval_only"])


def _in_trainer(values: dict[str, Any], folder: str, options: dict[str, Any], again: bool) -> None:
    """Play in a training process on a cluster, whose command keeps other processes out of the run."""
    if again:
        options = {**options, "resume": options["resume"] or NEWEST}
    _play(MinMaxConfig.from_dict(values), RunFolder(folder), options, alone=True)


def _play(config: MinMaxConfig, run: RunFolder, options: dict[str, Any], *, alone: bool = False) -> None:
    """Play or evaluate; `alone` where someone else locks the folder and says how to continue."""
    from rlhf_minmax import MinMaxJob  # late, so that mistakes in the settings are answered at once
    from rlhf_train.display.game import ConsoleEvents

    events = ConsoleEvents(quiet=not is_main_process())
    job = MinMaxJob(config, run, events, rebuild_demo=options["rebuild_demo"])
    resume = options["resume"] is not None
    with events, nullcontext() if alone else resumable(run, _JOB, trains=not options["eval_only"]):
        if options["eval_only"]:
            results = job.evaluate_only(checkpoint=checkpoint_to_evaluate(run) if resume else None)
        else:
            results = job.play(resume=resume)
    events.show_results(results, run)
