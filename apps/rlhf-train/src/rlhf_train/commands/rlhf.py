"""`rlhf-train rlhf`: from options to the three stages of traditional RLHF."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_algos.process_group import barrier, is_main_process
from rlhf_data import RunFolder, SettingsSource, UserError, apply_overrides, overrides_given
from rlhf_train.commands.dummy_data import create_dummy_data
from rlhf_train.commands.training import load_settings, of_method
from rlhf_train.inputs import check_inputs, described
from rlhf_train.options import settings_source
from rlhf_train.runs import resumable, resumed_run, run_of_all
from rlhf_train.trainers import train_on_cluster

if TYPE_CHECKING:
    from rlhf_algos import RLHFConfig

_JOB = "rlhf"
_KEY_OF_OPTION = {
    "model": "model_name_or_path",
    "reward_model": "reward_model",
    "data": "data",
    "sft_data": "sft_data",
    "preference_data": "preference_data",
    "prompt_data": "prompt_data",
    "stage": "stages",
    "seed": "seed",
}
_STAGE_OF = {"rlhf": "ppo"}
"""Other names of stages."""
_OF_EACH_STAGE = {
    "max_steps": "max_steps",
    "epochs": "num_train_epochs",
    "on_bad_row": "on_bad_row",
}
_CHANGES_A_RUN = (*_KEY_OF_OPTION, *_OF_EACH_STAGE, "create_dummy_data", "config", "overrides", "dry_run")


def run_rlhf(options: dict[str, Any]) -> None:
    """Resolve the settings, open the run folder, and run, evaluate or plan the stages."""
    from rlhf_algos import RLHFConfig

    if options["resume"] is not None:
        run = resumed_run(options, _JOB, _CHANGES_A_RUN)
        where = str(run.path / "config.json")
        values = of_method(_JOB, run.read_config(), where)
        config = RLHFConfig.from_dict(values, where=where)
        _begin(config, run, options, SettingsSource(where))
        return
    if options["create_dummy_data"] is not None:
        options = {**options, "data": _dummy_data(options)}
    source = settings_source(_JOB, options, _keys_of())
    config = resolve_config(options, source)
    with run_of_all(options, _JOB) as run:
        _begin(config, run, options, source)


def _dummy_data(options: dict[str, Any]) -> str:
    """The folder of example rows, written by the first process."""
    for name in ("data", "sft_data", "preference_data", "prompt_data"):
        if options[name] is not None:
            raise UserError(
                f"--create-dummy-data and --{name.replace('_', '-')}: give either example rows or your own",
                code="conflicting_options",
            )
    folder = options["create_dummy_data"]
    if is_main_process():
        create_dummy_data(folder)
    barrier()
    return folder


def resolve_config(options: dict[str, Any], source: SettingsSource) -> RLHFConfig:
    """The settings: the config file, then `--set`, then the options, each over the one before."""
    from rlhf_algos import STAGES, RLHFConfig

    values = load_settings(options["config"]) if options["config"] else {}
    values = apply_overrides(of_method(_JOB, values, source.name), options["overrides"])
    sections = {stage: values[stage] for stage in STAGES if isinstance(values.get(stage), dict)}
    written = [stage for stage, section in sections.items() if section.keys() - {*_OF_EACH_STAGE.values()}]
    for name, key in _KEY_OF_OPTION.items():
        if options[name] not in (None, ()):
            values[key] = options[name]
    if options["stage"]:
        named = {_STAGE_OF.get(stage, stage) for stage in options["stage"]}
        values["stages"] = [stage for stage in STAGES if stage in named]
    elif values.get("reward_model"):
        values.setdefault("stages", ["sft", "ppo"])
    given = {key: options[name] for name, key in _OF_EACH_STAGE.items() if options[name] is not None}
    if options["epochs"] is not None and options["max_steps"] is None:
        given["max_steps"] = -1
    for stage in STAGES:
        section = values.get(stage, {})
        if given and isinstance(section, dict):  # anything else is refused below
            values[stage] = {**section, **given}
    model_config = options["model_config"] or values.pop("model_config", None)
    if model_config is not None:
        first = next(iter(values.get("stages", STAGES)), STAGES[0])
        values[first] = {**values.get(first, {}), "model_config": model_config}
    config = RLHFConfig.from_dict(values, where=source)
    _refuse_unused(config, written, options["overrides"])
    for stage in ("ppo",) if config.embedded else config.stages:
        _refuse_unknown(stage, getattr(config, stage), source)
    return config


def _refuse_unknown(stage: str, section: dict[str, Any], source: SettingsSource) -> None:
    """Refuse keys that a stage does not have before torch is loaded; values are looked at when it begins."""
    from rlhf_algos import METHODS

    own = replace(source.of_section(stage), listed_by=f"rlhf-train settings {stage}")
    try:
        METHODS[stage].resolve(section, where=own)
    except UserError as error:
        if error.code == "unknown_key":
            raise


def _refuse_unused(config: RLHFConfig, written: Sequence[str], overrides: Sequence[str]) -> None:
    """Refuse settings of stages that do not run; only those of a file may wait for another run."""
    from rlhf_algos import STAGES

    if config.embedded and (unused := [stage for stage in written if stage != "ppo"]):
        raise UserError(
            f"{unused[0]} has settings, but without data its model is the one of rlhf-train minmax; leave "
            f"{unused[0]} out, or give data",
            code="stage_not_run",
            key=unused[0],
        )
    for key, words in overrides_given(overrides):
        stage = key.partition(".")[0]
        if stage in STAGES and stage not in config.stages:
            raise UserError(
                f"{words}: the stage {stage} does not run; leave it out, or name the stage with --stage",
                code="stage_not_run",
                key=key,
            )


def _keys_of() -> dict[str, tuple[str, ...]]:
    """The keys that each option is the value of."""
    from rlhf_algos import STAGES

    of_stages = {name: tuple(f"{stage}.{key}" for stage in STAGES) for name, key in _OF_EACH_STAGE.items()}
    return {name: (key,) for name, key in _KEY_OF_OPTION.items()} | of_stages


def _begin(config: RLHFConfig, run: RunFolder, options: dict[str, Any], source: SettingsSource) -> None:
    """Plan, or run the stages in this process or in training processes on a cluster."""
    from rlhf_algos import trainers

    cluster = trainers(config)
    if cluster is None or options["dry_run"]:
        _check(config, run)
        if options["dry_run"]:
            _plan(config, run, source)
        else:
            _work(config, run, options, source)
        return
    work = partial(_in_trainer, config.to_dict(), str(run.path.resolve()), options, source)
    train_on_cluster(cluster, config, run, work, job=_JOB, trains=not options["eval_only"])


def _in_trainer(
    values: dict[str, Any], folder: str, options: dict[str, Any], source: SettingsSource, again: bool
) -> None:
    """Run the stages in a training process on a cluster; `again` or not, those that began go on."""
    from rlhf_algos import RLHFConfig

    config, run = RLHFConfig.from_dict(values), RunFolder(folder)
    _check(config, run)
    _work(config, run, options, source, alone=True)


def _check(config: RLHFConfig, run: RunFolder) -> None:
    from rlhf_train.display.training import TrainingDisplay

    with TrainingDisplay(quiet=not is_main_process()) as display:
        display.say(f"rlhf-train {_JOB}: {described(config)}, into {run.path}")
        check_inputs(config)


def _plan(config: RLHFConfig, run: RunFolder, source: SettingsSource) -> None:
    from rlhf_algos import RLHFTrainer, plan_training
    from rlhf_train.commands.rlhf_story import story_plan
    from rlhf_train.display.training import TrainingDisplay

    with TrainingDisplay(quiet=not is_main_process()) as display, tempfile.TemporaryDirectory() as folder:
        if config.embedded:
            config = story_plan(config, Path(folder))
        for stage, settings in RLHFTrainer(config, run, source=source).plannable().items():
            display.stage(stage)
            plan = plan_training(stage, settings)
            rows = [(label, text.replace(f"{folder}/", "")) for label, text in plan["rows"]]
            display.show_plan({**plan, "rows": rows})


def _work(
    config: RLHFConfig,
    run: RunFolder,
    options: dict[str, Any],
    source: SettingsSource,
    *,
    alone: bool = False,
) -> None:
    """Run or evaluate the stages; `alone` where someone else locks the folder and says how to continue."""
    from rlhf_algos import RLHFTrainer
    from rlhf_train.commands.rlhf_story import rows_for, story_stages
    from rlhf_train.display.training import TrainingDisplay

    shown = ("loss", "reward", "accuracy", "objective/kl")
    display = TrainingDisplay(shown, quiet=not is_main_process())
    lock = nullcontext() if alone else resumable(run, _JOB, trains=not options["eval_only"])
    with display, lock, rows_for(run):
        if config.embedded:
            config = story_stages(config, run, display, source)
        job = RLHFTrainer(
            config,
            run,
            on_stage=display.stage,
            on_report=display.on_report,
            progress=display.progress,
            source=source,
        )
        results = job.evaluate_only() if options["eval_only"] else job.train()
        for stage, found in results["stages"].items():
            display.show_table(found, title=f"Held-out rows, stage {stage}")
        display.show_end(results, run)
