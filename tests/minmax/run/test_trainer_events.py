"""Around the game's steps: trackers, early stopping, the best checkpoint, debug switches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from files import CLOCK
from raises import raises_error
from rlhf_data import RunFolder
from rlhf_minmax import Events, MinMaxJob, MinMaxTrainer
from rlhf_minmax.run.distributed import check_processes

SMALL = ("training.max_steps=4", "training.batch_size=2", "game.num_generations=2", "game.num_critiques=2")
EVALUATED = ("training.eval_steps=1", "diagnostics.exploitability_stories=0")
ACCURACIES = (0.25, 0.75, 0.5, 0.25)
"""Of the evaluations after each step."""


@pytest.fixture
def scripted_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation after step i gives ACCURACIES[i - 1]; the game goes on as it would."""

    def measured(pipeline: Any, records: Any, policy: Any, held_out: Any = None) -> dict[str, float]:
        del pipeline, records, policy, held_out
        return {"policy/accuracy": ACCURACIES[MinMaxTrainer.now.step - 1]}  # pyright: ignore

    train_step = MinMaxTrainer.train_step

    def remembered(self: MinMaxTrainer) -> Any:
        MinMaxTrainer.now = self  # pyright: ignore
        return train_step(self)

    monkeypatch.setattr(MinMaxTrainer, "now", None, raising=False)
    monkeypatch.setattr(MinMaxTrainer, "train_step", remembered)
    monkeypatch.setattr("rlhf_minmax.run.trainer.measure_game", measured)


def trainer_of(make_game: Any, folder: Path | None, *overrides: str) -> MinMaxTrainer:
    pipeline, stories = make_game(*SMALL, *overrides)
    run = RunFolder.create(folder, resume=True) if folder else None
    return MinMaxTrainer(pipeline, pipeline.config, stories.train[:5], stories.held_out[:4], run=run)


def weights(trainer: MinMaxTrainer) -> list[torch.Tensor]:
    players = trainer.pipeline.players
    return [p.detach().clone() for player in (players.policy, players.monitor) for p in player.parameters()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def rows(folder: Path) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in row.items() if not k.startswith(CLOCK)} for row in RunFolder(folder).read_metrics()
    ]


@pytest.mark.slow
def test_trackers_get_the_numbers_of_every_step(make_game: Any, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reports = []
    trainer = trainer_of(
        make_game, tmp_path, *EVALUATED, "training.report_to=tensorboard", "training.max_steps=2"
    )
    trainer.on_report = reports.append
    trainer.train()
    written = RunFolder(tmp_path).read_metrics()
    (folder,) = {path.parent for path in tmp_path.glob("tensorboard/**/events*")}
    events = EventAccumulator(str(folder))
    events.Reload()
    for name in ("loss", "policy/accuracy", "dual/lambda", "eval_policy/accuracy"):
        found = [(scalar.step, scalar.value) for scalar in events.Scalars(name)]
        assert found == [(row["step"], pytest.approx(row[name])) for row in written], name
    assert [(each.step, each.total) for each in reports] == [(1, 2), (2, 2)]
    assert all(each.tokens_per_second > 0 and "eval_policy/accuracy" in each.evaluation for each in reports)
    assert [each.checkpoint.name for each in reports] == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.slow
@pytest.mark.usefixtures("scripted_evaluations")
def test_stops_early_and_stays_stopped(make_game: Any, tmp_path: Path) -> None:
    patient = (*EVALUATED, "training.early_stopping_patience=1", "training.save_steps=null")
    trainer = trainer_of(make_game, tmp_path, *patient)
    trainer.train()
    assert trainer.step == 3 < trainer.total_steps
    assert [row["eval_policy/accuracy"] for row in rows(tmp_path)] == list(ACCURACIES[:3])
    assert [step for step, _ in RunFolder(tmp_path).checkpoints()] == [3]
    again = trainer_of(make_game, tmp_path, *patient)
    assert again.resume()
    again.train()
    assert again.step == 3 and len(rows(tmp_path)) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("scripted_evaluations")
def test_the_best_checkpoint_is_kept_and_taken_at_the_end_resumed_or_not(
    make_game: Any, tmp_path: Path
) -> None:
    best = (*EVALUATED, "training.load_best_model_at_end=true", "training.save_total_limit=1")
    best = (*best, "training.save_steps=null")
    whole = trainer_of(make_game, tmp_path / "whole", *best)
    after: list[list[torch.Tensor]] = []
    whole.on_step = lambda *_: after.append(weights(whole))
    whole.train()
    assert equal(weights(whole), after[1]) and not equal(after[1], after[3])
    assert [step for step, _ in RunFolder(tmp_path / "whole").checkpoints()] == [2, 4]

    class Killed(Exception):
        pass

    def die(step: int, *_: Any) -> None:
        if step == 3:
            raise Killed

    part = trainer_of(make_game, tmp_path / "parts", *best)
    part.on_step = die
    with pytest.raises(Killed):
        part.train()
    last = trainer_of(make_game, tmp_path / "parts", *best)
    assert last.resume() and last.step == 3
    last.train()
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole") and equal(weights(last), weights(whole))
    assert last.optimizer.dual == whole.optimizer.dual


class Told(Events):
    """Keeps the remarks."""

    def __init__(self) -> None:
        self.remarks: list[str] = []

    def remark(self, text: str) -> None:
        self.remarks.append(text)


@pytest.mark.slow
@pytest.mark.usefixtures("scripted_evaluations", "no_figures")
def test_the_final_players_of_a_run_are_those_of_the_best_checkpoint(
    make_config: Any, demo_cache: Path, tmp_path: Path
) -> None:
    best = ("training.load_best_model_at_end=true", "training.early_stopping_patience=1", "baseline=false")
    config, told = make_config(*SMALL, *EVALUATED, *best, "data.eval_stories=4"), Told()
    run = RunFolder.create(tmp_path / "run")
    results = MinMaxJob(config, run, told, cache_folder=demo_cache).play()
    assert results["steps"] == 3
    for role in ("policy", "monitor"):
        taken, last = (run.path / f"checkpoint-{step}" / role for step in (2, 3))
        final = (run.path / "final" / role / "adapter_model.safetensors").read_bytes()
        assert final == (taken / "adapter_model.safetensors").read_bytes()
        assert final != (last / "adapter_model.safetensors").read_bytes()
    _, early, taken = told.remarks  # after that of the start
    assert "step 3 of 4" in early and "eval_policy/accuracy" in early and "checkpoint-2" in taken


@pytest.mark.parametrize("setting", ["early_stopping_patience=1", "load_best_model_at_end=true"])
def test_comparing_evaluations_that_there_will_not_be_is_refused(make_game: Any, setting: str) -> None:
    with raises_error("missing_evaluation", missing="eval_steps"):
        trainer_of(make_game, None, f"training.{setting}")


@pytest.mark.parametrize("metric", ["bleu", "policy/hack_rate"])
def test_a_best_metric_that_is_not_measured_is_refused_before_the_game(
    make_config: Any, demo_cache: Path, tmp_path: Path, metric: str
) -> None:
    """`bleu` does not exist, and the hack rate is undefined because no story has a bait."""
    best = f"training.metric_for_best_model={metric}"
    world = "data.story_world.hearsay_rate=0"
    config = make_config(*SMALL, *EVALUATED, best, "data.eval_stories=4", world)
    run = RunFolder.create(tmp_path / "run")
    with raises_error("unknown_metric", metric=f"eval_{metric}"):
        MinMaxJob(config, run, cache_folder=demo_cache).play()
    assert run.read_metrics() == []


@pytest.mark.slow
def test_debug_switches_write_and_draw_of_both_players_and_change_nothing(
    make_game: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropout = ("policy_model.lora_dropout=0.2", "monitor_model.lora_dropout=0.2")
    debug = ("training.debug_gradient_flow=2", "training.debug_activations=2", *dropout)
    plain, debugged = trainer_of(make_game, None, *dropout), trainer_of(make_game, tmp_path, *debug)
    for trainer in (plain, debugged):
        trainer.train()
    assert equal(weights(plain), weights(debugged))
    for role in ("policy", "monitor"):
        run = RunFolder(tmp_path / role)
        gradients, activations = (
            run.read_lines(f"{name}.jsonl") for name in ("gradient_flow", "activations")
        )
        assert [row["step"] for row in gradients] == [row["step"] for row in activations] == [2, 4]
        assert all(f".{role}." in name for row in gradients for name in row["norms"])
        assert any(norm > 0 for row in gradients for norm in row["norms"].values())
        for name in ("gradient_flow.png", "activations.png"):
            assert (run.path / name).read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("rlhf_eval.can_draw", lambda: False)  # it takes seconds
    again = trainer_of(make_game, tmp_path, *debug)
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()
    assert again.resume() and again.step == 3
    again.train()
    assert [row["step"] for row in RunFolder(tmp_path / "policy").read_lines("gradient_flow.jsonl")] == [2, 4]


@pytest.mark.slow
def test_eight_bit_moments_of_both_players_are_resumed_to_the_bit(make_game: Any, tmp_path: Path) -> None:
    small = ("training.optim=adamw_bnb_8bit", "policy_model.use_lora=false", "monitor_model.use_lora=false")
    whole = trainer_of(make_game, tmp_path / "whole", *small)
    whole.train()
    for player in whole.optimizer.players().values():
        moments = [state["state1"].dtype for state in player.stepper.optimizer.state.values()]
        assert torch.uint8 in moments
    part = trainer_of(make_game, tmp_path / "whole", *small)
    (tmp_path / "whole" / "checkpoint-4" / "trainer_state.json").unlink()
    assert part.resume() and part.step == 3
    part.train()
    assert equal(weights(part), weights(whole))


@pytest.mark.parametrize("sharding", ["deepspeed", "fsdp"])
def test_what_cannot_be_sharded_is_refused(
    make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharding: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    path = tmp_path / "zero2.json"
    path.write_text('{"zero_optimization": {"stage": 2}}')
    sharded = f"training.{sharding}={path if sharding == 'deepspeed' else 'true'}"
    check_processes(make_config(sharded))
    for setting in (
        *("training.optim=adamw_bnb_8bit", "training.debug_gradient_flow=1"),
        "training.load_best_model_at_end=true",
    ):
        name = setting.partition("=")[0].rpartition(".")[2]
        with raises_error("cannot_be_sharded", key=name):
            check_processes(make_config(sharded, setting))


def test_fsdp_needs_several_processes_and_no_deepspeed(make_config: Any) -> None:
    with raises_error("single_process"):
        check_processes(make_config("training.fsdp=true"))
    with raises_error("invalid_value", key="training"):
        make_config("training.fsdp=true", "training.deepspeed=zero.json")


@pytest.mark.slow
def test_a_step_with_a_finding_is_always_logged(make_game: Any, tmp_path: Path) -> None:
    trainer = trainer_of(make_game, tmp_path, "training.logging_steps=3", "training.max_steps=5")
    step = trainer.train_step

    def found() -> Any:
        return step() | ({"findings": ["odd"]} if trainer.step == 2 else {})

    trainer.train_step = found
    trainer.train()
    logged = [row["step"] for row in RunFolder(tmp_path).read_metrics()]
    assert {2, 3, 5} <= set(logged) and 1 not in logged
