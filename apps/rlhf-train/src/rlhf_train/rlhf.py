"""`rlhf-train rlhf`: from options to the three stages of traditional RLHF."""

from __future__ import annotations

from typing import Any

from rlhf_data import RunFolder, apply_overrides, load_config_file
from rlhf_train.runs import new_run, resumable, resumed_run

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
_OF_EACH_STAGE = {"max_steps": "max_steps", "epochs": "num_train_epochs"}
_CHANGES_A_RUN = (*_KEY_OF_OPTION, *_OF_EACH_STAGE, "config", "overrides", "dry_run")


def run_rlhf(options: dict[str, Any]) -> None:
    """Resolve the settings, open the run folder, and run, evaluate or plan the stages.

    Raises:
        UserError: options, settings, data or models cannot be used.
    """
    from rlhf_algos.orchestrator import RLHFConfig

    if options["resume"] is not None:
        run = resumed_run(options, _JOB, _CHANGES_A_RUN)
        values = {key: value for key, value in run.read_config().items() if key != "method"}
        _work(RLHFConfig.from_dict(values, where=str(run.path / "config.json")), run, options)
        return
    config = resolve_config(options)
    with new_run(options, _JOB) as run:
        _work(config, run, options)


def resolve_config(options: dict[str, Any]) -> Any:
    """The settings: the config file, then `--set`, then the options, each over the one before.

    Raises:
        UserError: an unknown key, a value out of range, a file that cannot be read.
    """
    from rlhf_algos.orchestrator import STAGES, RLHFConfig

    source = options["config"]
    values = apply_overrides(load_config_file(source) if source else {}, options["overrides"])
    values.pop("method", None)
    for name, key in _KEY_OF_OPTION.items():
        if options[name] not in (None, ()):
            values[key] = options[name]
    if options["stage"]:
        values["stages"] = [stage for stage in STAGES if stage in options["stage"]]
    for name, key in _OF_EACH_STAGE.items():
        if options[name] is not None:
            for stage in STAGES:
                values[stage] = {**values.get(stage, {}), key: options[name]}
    return RLHFConfig.from_dict(values, where=str(source) if source else "config")


def _work(config: Any, run: RunFolder, options: dict[str, Any]) -> None:
    from rlhf_algos.orchestrator import RLHFOrchestrator
    from rlhf_train.rlhf_story import story_stages, uses_stories
    from rlhf_train.training_display import TrainingDisplay

    display = TrainingDisplay(("loss", "reward", "accuracy", "objective/kl"))
    with display, resumable(run, _JOB):
        if uses_stories(config):
            config = story_stages(config, run, display)
        job = RLHFOrchestrator(
            config, run, on_stage=display.stage, on_step=display.on_step, progress=display.progress
        )
        if options["dry_run"]:
            from rlhf_algos.planning import plan_training

            for stage, settings in job.plannable().items():
                display.stage(stage)
                display.show_plan(plan_training(stage, settings))
            return
        results = job.evaluate_only() if options["eval_only"] else job.train()
        for stage, found in results.get("stages", results).items():
            display.show_table(found, title=f"Held-out rows, stage {stage}")
        display.show_end(results, run)
