"""`rlhf-train <method>`, for every method of `METHODS`: from options to a job."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from rlhf_algos import METHODS, trainers
from rlhf_algos.process_group import is_main_process
from rlhf_data import RunFolder, UserError, apply_overrides, load_config_file
from rlhf_train.inputs import check_inputs, check_planned, described
from rlhf_train.options import NEWEST, settings_source
from rlhf_train.plugins import file_of, load_methods, source_of
from rlhf_train.runs import checkpoint_to_evaluate, other_workers, resumable, resumed_run, run_of_all
from rlhf_train.trainers import processes_of, share_rows, train_on_cluster

if TYPE_CHECKING:
    from rlhf_algos import TrainingJob
    from rlhf_algos.jobs.config import JobConfig
    from rlhf_train.display.training import TrainingDisplay
    from rlhf_train.trl.backend import TRLJob

_KEY_OF_OPTION = {
    "model": "model_name_or_path",
    "model_config": "model_config",
    "train_data": "train_data",
    "eval_data": "eval_data",
    "max_steps": "max_steps",
    "epochs": "num_train_epochs",
    "seed": "seed",
    "subset_size": "subset_size",
    "on_bad_row": "on_bad_row",
    "backend": "backend",
    "reward": "reward",
}
_MODEL_SHAPE = {"architecture", "hidden_size", "n_embd", "num_layers", "n_layer"}
"""Keys of a model's description, see `rlhf_models.loading.scratch`, which are not settings of a training."""
_LENGTH = ("max_steps", "epochs")
_CHANGES_A_RUN = (*(name for name in _KEY_OF_OPTION if name not in _LENGTH), "config", "overrides", "dry_run")


def run_training(method: str, options: dict[str, Any]) -> None:
    """Resolve the settings, open the run folder, and train, evaluate or plan."""
    check_planned(options)
    if options["resume"] is not None:
        if options["eval_only"] and _given_length(options):
            raise UserError(
                "--max-steps and --epochs extend a training, and --eval-only trains nothing; leave one out",
                code="conflicting_options",
            )
        run = resumed_run(options, method, _CHANGES_A_RUN)
        where = str(run.path / "config.json")
        values = of_method(method, run.read_config(), where)
        values |= _given_length(options)
        values |= other_workers(options, values, values if METHODS[method].online else None)
        config = METHODS[method].job_config.from_dict(values, where=where)
        _begin(method, config, run, options)
        return
    config = resolve_config(method, options)
    with run_of_all(options, method) as run:
        _begin(method, config, run, options)


def resolve_config(method: str, options: dict[str, Any]) -> JobConfig:
    """The settings: the config file, then `--set`, then the options, each over the one before.

    For the tiny model that is built without a given one, values that suit it have the lowest precedence.
    """
    source = options["config"]
    values = load_settings(source) if source else {}
    where = str(source) if source else "config"
    if options.get("distributed"):
        values["distributed"] = load_config_file(options["distributed"])
    values = apply_overrides(of_method(method, values, where), options["overrides"])
    given = {key: options[name] for name, key in _KEY_OF_OPTION.items() if _is_given(options, name)}
    keys_of = {name: (key,) for name, key in _KEY_OF_OPTION.items()}
    origin = settings_source(method, options, keys_of)
    return METHODS[method].resolve(values | given | _given_length(options), where=origin)


def _given_length(options: dict[str, Any]) -> dict[str, Any]:
    """The length of the training that the options give; epochs alone take the place of steps."""
    given = {_KEY_OF_OPTION[name]: options[name] for name in _LENGTH if options[name] is not None}
    return {"max_steps": -1} | given if given else {}


def load_settings(source: str) -> dict[str, Any]:
    """The settings of a file; of one that describes a model, only that the model is made from it."""
    values = load_config_file(source)
    return {"model_config": str(source)} if _MODEL_SHAPE & values.keys() else values


def _is_given(options: dict[str, Any], name: str) -> bool:
    return options.get(name) not in (None, ())


def of_method(method: str, values: dict[str, Any], where: str) -> dict[str, Any]:
    """Settings without the name of their method, which a run's config.json begins with."""
    named = values.get("method", method)
    if named != method:
        raise UserError(f"{where} is of a run of {named}; call rlhf-train {named} with it")
    return {key: value for key, value in values.items() if key != "method"}


def _begin(method: str, config: JobConfig, run: RunFolder, options: dict[str, Any]) -> None:
    """Do the work in this process, or in training processes on a cluster."""
    cluster = trainers(config)
    if cluster is None or options["dry_run"]:
        _work(method, config, run, options)
        return
    from rlhf_algos.jobs.online import check_parts

    check_parts(config)
    work = partial(_in_trainer, method, config.to_dict(), str(run.path.resolve()), options, file_of(method))
    job = f"{method}{source_of(method)}"
    train_on_cluster(cluster, config, run, work, job=job, trains=not options["eval_only"])


def _in_trainer(
    method: str, values: dict[str, Any], folder: str, options: dict[str, Any], file: str | None, again: bool
) -> None:
    """Do the work in a training process on a cluster, whose command keeps other processes out of the run."""
    if file:
        load_methods(file)
    run = RunFolder(folder)
    config = METHODS[method].job_config.from_dict(share_rows(values, run))
    if again:
        options = {**options, "resume": options["resume"] or NEWEST}
    _work(method, config, run, options, alone=True)


def _work(
    method: str, config: JobConfig, run: RunFolder, options: dict[str, Any], *, alone: bool = False
) -> None:
    """Train, evaluate or plan; `alone` where someone else locks the folder and says how to continue."""
    from rlhf_train.display.training import TrainingDisplay

    display = TrainingDisplay(quiet=not is_main_process())
    with display:
        display.say(f"rlhf-train {method}: {described(config)}, into {run.path}")
        check_inputs(config, dry_run=options["dry_run"])
        display.shown = METHODS[method].trainer_class.shown_metrics
        if config.backend == "trl":
            from rlhf_train.trl.backend import check_settings

            check_settings(method, config)
        if options["dry_run"]:
            from rlhf_algos import plan_machine, plan_training

            machine = plan_machine(options["processes"] or processes_of(config), options["gpu"])
            plan = plan_training(method, config, machine)
            display.show_plan({**plan, "rows": [*plan["rows"], ("output folder", str(run.path))]})
            return
        job = _job(method, config, run, display)
        resume = options["resume"] is not None
        trains = not options["eval_only"]
        with nullcontext() if alone else resumable(run, f"{method}{source_of(method)}", trains=trains):
            if options["eval_only"]:
                results = job.evaluate_only(checkpoint_to_evaluate(run) if resume else None)
            else:
                results = job.train(resume=resume)
    display.show_results(results, run)


def _job(method: str, config: JobConfig, run: RunFolder, display: TrainingDisplay) -> TrainingJob | TRLJob:
    if config.backend == "trl":
        from rlhf_train.trl.backend import TRLJob

        return TRLJob(method, config, run, on_report=display.on_report)
    from rlhf_algos import TrainingJob

    return TrainingJob(method, config, run, on_report=display.on_report, progress=display.progress)
