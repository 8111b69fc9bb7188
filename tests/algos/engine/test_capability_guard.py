"""Suites during a training: damage is found and undone, never twice the same way; an intact model goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from raises import raises_error
from rlhf_algos import METHODS, SFTConfig, SFTTrainer
from rlhf_algos.jobs.dry_run import plan_training
from rlhf_algos.safeguards.capability import ROLLBACKS, START
from rlhf_data import RunFolder, TokenSequence
from rlhf_models.loading.tiny import tiny_model, train_byte_tokenizer

Damage = Callable[[SFTTrainer, set[int], list[tuple[int, list[int], float]]], None]
TEXTS = [
    f"the {colour} {thing} is here" for colour in ("red", "blue", "green") for thing in ("cat", "cup", "hat")
]
CONFIG = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 2,
    "max_steps": 6,
    "capability_steps": 2,
    "save_steps": None,
    "stage_samples": 0,
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_byte_tokenizer(TEXTS, vocab_size=300)


@pytest.fixture
def make(tokenizer: Any, tmp_path: Path):
    """A trainer on texts whose own suite is how likely they are; it can only rise."""
    suite = tmp_path / "texts.jsonl"
    suite.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))

    def build(run: RunFolder | None, **settings: Any) -> SFTTrainer:
        rows = [TokenSequence(tokenizer(text)["input_ids"], 1) for text in TEXTS]
        config = SFTConfig.from_dict(CONFIG | {"capability_suites": [f"mine={suite}"]} | settings)
        model = tiny_model("llama", vocab_size=300, seed=0)
        return SFTTrainer(model, config, rows, tokenizer=tokenizer, run=run)

    return build


@pytest.fixture
def damage(monkeypatch: pytest.MonkeyPatch) -> Damage:
    """Makes a trainer's weights noise after some steps."""
    return partial(_damage, monkeypatch)


def _damage(
    patch: pytest.MonkeyPatch, trainer: SFTTrainer, at: set[int], seen: list[tuple[int, list[int], float]]
) -> None:
    """Let the weights be noise after the steps `at`, each once; note step, rows and learning rate."""
    step, left = trainer.train_step, set(at)

    def damaged(examples: Any) -> dict[str, float]:
        rows, rate = list(trainer.rows), trainer.optimizer.param_groups[0]["lr"]
        found = step(examples)
        seen.append((trainer.step, rows, rate))
        if trainer.step in left:
            left.discard(trainer.step)
            with torch.no_grad():
                for parameter in trainer.parameters:
                    parameter.add_(torch.randn_like(parameter))
        return found

    patch.setattr(trainer, "train_step", damaged)


@pytest.mark.parametrize(("suite", "code"), [("stories", "context_too_short"), ("nosuch", "unknown_suite")])
def test_a_dry_run_reads_the_suites(suite: str, code: str, tokenizer: Any, tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=300)  # its context holds 128 tokens, and a story needs 180
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    start = {"model_name_or_path": str(tmp_path / "model"), "train_data": str(tmp_path / "rows.jsonl")}
    settings = {**start, "max_length": 64, "capability_suites": [suite]}
    plan_training("sft", METHODS["sft"].job_config.from_dict(settings))
    with raises_error(code):
        plan_training("sft", METHODS["sft"].job_config.from_dict({**settings, "capability_steps": 2}))


def test_damage_is_undone_and_training_goes_another_way(make: Any, damage: Damage, tmp_path: Path) -> None:
    run, reports = RunFolder.create(tmp_path / "run"), []
    trainer, seen = make(run), []
    trainer.on_report = reports.append
    damage(trainer, {3}, seen)
    trainer.train()
    assert [step for step, _, _ in seen] == [1, 2, 3, 4, 3, 4, 5, 6]
    (third, rows, rate), (again, other, slower) = seen[2], seen[4]
    assert third == again and rows != other and slower == pytest.approx(rate / 2)
    (event,) = json.loads((run.path / ROLLBACKS).read_text())
    assert event["step"] == 4 and event["to"] == 2 and "a loss to start" in event["reasons"][0]
    assert all(each.tokens_per_second is None or each.tokens_per_second > 0 for each in reports)
    logged = run.read_metrics()
    assert [row["step"] for row in logged] == [1, 2, 3, 4, 5, 6]
    assert [row["rollbacks"] for row in logged if "rollbacks" in row] == [0, 1, 1]
    assert logged[5]["capability/mine"] > logged[1]["capability/mine"]
    assert (run.path / START / "items.jsonl").exists()


def test_rollback_restores_weights_and_optimizer(make: Any, damage: Damage, tmp_path: Path) -> None:
    trainer = make(RunFolder.create(tmp_path / "run"), max_rollbacks=0)
    damage(trainer, {3}, [])
    trainer.train()
    undisturbed = make(RunFolder.create(tmp_path / "other"), max_steps=2)
    undisturbed.train()
    assert trainer.step == 2  # the training has ended with the last model that had lost nothing
    for ours, theirs in zip(trainer.parameters, undisturbed.parameters, strict=True):
        assert torch.equal(ours, theirs)
        mine, other = (each.optimizer.state[p] for each, p in ((trainer, ours), (undisturbed, theirs)))
        assert torch.equal(mine["exp_avg"], other["exp_avg"])
    assert trainer.train() == {} and trainer.step == 2


def test_a_run_killed_between_decision_and_rollback_ends_the_same(
    make: Any, damage: Damage, tmp_path: Path
) -> None:
    whole, killed = (make(RunFolder.create(tmp_path / name)) for name in ("whole", "killed"))
    damage(whole, {3}, [])
    whole.train()
    damage(killed, {3}, [])
    killed.guard.roll_back = lambda: (_ for _ in ()).throw(SystemExit)
    with pytest.raises(SystemExit):
        killed.train()
    resumed = make(killed.run)
    assert resumed.resume() and resumed.step == 2 and resumed.guard.rollbacks == 1
    resumed.train()
    for ours, theirs in zip(resumed.parameters, whole.parameters, strict=True):
        assert torch.equal(ours, theirs)


def test_the_tested_checkpoint_outlives_newer_ones(make: Any, damage: Damage, tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    trainer = make(run, capability_steps=5, save_steps=1, save_total_limit=1, max_steps=4)
    trainer.train()
    assert [step for step, _ in run.checkpoints()] == [4]  # the last step is measured too, and pinned
    trainer = make(RunFolder.create(tmp_path / "two"), capability_steps=5, save_steps=1, save_total_limit=1)
    damage(trainer, {5}, [])
    trainer.train()
    assert trainer.step == 6 and trainer.guard.rollbacks == 1


def test_guarding_changes_nothing_where_nothing_is_lost(make: Any, tmp_path: Path) -> None:
    guarded = make(RunFolder.create(tmp_path / "run"))
    plain = make(RunFolder.create(tmp_path / "plain"), capability_steps=None)
    guarded.train()
    plain.train()
    assert all(torch.equal(a, b) for a, b in zip(guarded.parameters, plain.parameters, strict=True))


def test_mistakes(make: Any, tmp_path: Path) -> None:
    with raises_error("missing_run_folder"):
        make(None)
    with raises_error("unknown_suite", suite="poems"):
        make(RunFolder.create(tmp_path / "run"), capability_suites="poems")
    with raises_error("invalid_value"):
        SFTConfig.from_dict(CONFIG | {"load_best_model_at_end": True, "eval_steps": 1})
