"""What goes wrong around a training run leaves the last good checkpoint, from which it goes on exactly."""

from __future__ import annotations

import logging
import resource

import pytest
import torch

from raises import raises_error
from rlhf_algos import DPOConfig, DPOTrainer
from rlhf_algos.engine.optimizer_step import epoch_order
from rlhf_algos.tracking.run_facts import MACHINE_KEYS
from rlhf_data import RunFolder
from rlhf_data.runs.atomic import DiskFullError
from rlhf_models import LoraSettings, add_adapters, tiny_model

STEPS = 7


@pytest.fixture
def make(examples):
    """A DPO training of a LoRA adapter with dropout, three steps an epoch, a checkpoint every two steps."""

    def trainer(run, **options):
        model = add_adapters(tiny_model("llama", vocab_size=40), ["default"], LoraSettings(lora_dropout=0.1))
        config = DPOConfig(
            learning_rate=3e-3, per_device_train_batch_size=4, max_steps=STEPS, save_steps=2, seed=5
        )
        return DPOTrainer(model, config, examples("pairs", count=10), run=run, **options)

    return trainer


@pytest.fixture
def whole(make, tmp_path):
    """Metrics and weights of a run to which nothing happens."""
    run = RunFolder.create(tmp_path / "whole")
    trainer = make(run)
    trainer.train()
    return result(run, trainer)


def result(run, trainer):
    rows = [{k: v for k, v in row.items() if k not in MACHINE_KEYS} for row in run.read_metrics()]
    return rows, [parameter.detach().tolist() for parameter in trainer.parameters]


def go_on(make, run, *, start):
    """Resume a run, which must be at a step, and train it to its end."""
    trainer = make(run)
    assert trainer.resume() and trainer.step == start
    trainer.train()
    return result(run, trainer)


def steps(run):
    return [step for step, _ in run.checkpoints()]


def test_a_loss_that_is_no_number_stops_the_run_and_leaves_the_last_good_checkpoint(make, whole, tmp_path):
    run = RunFolder.create(tmp_path / "run")
    trainer = make(run)

    def poison(step, metrics):
        if step == 4:
            with torch.no_grad():
                trainer.parameters[0][0, 0] = float("nan")

    trainer.on_step = poison  # it comes before the checkpoint of step 4, which then holds what it did
    trainer.config = trainer.config.model_copy(update={"save_steps": 3})
    rows = epoch_order(10, 1, shuffle=True, seed=5)[4:8]  # those of step 5, the second of the second epoch
    with raises_error("non_finite_loss") as stopped:
        trainer.train()
    said = str(stopped.value)
    assert said.startswith("step 5 gave loss nan, gradient norm nan at learning rate ")
    assert f"on the 4 training examples {', '.join(map(str, rows))} (counted from 0)" in said
    assert said.endswith(f"the last good checkpoint is {run.checkpoint_path(3)}")
    assert steps(run) == [3] and [row["step"] for row in run.read_metrics()] == [1, 2, 3, 4]
    assert go_on(make, run, start=3) == whole


def test_a_damaged_newest_checkpoint_is_passed_over_by_name(make, whole, tmp_path, caplog):
    run = RunFolder.create(tmp_path / "run")
    make(run).train()
    assert steps(run) == [6, 7]
    weights = run.checkpoint_path(7) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    with caplog.at_level(logging.WARNING):
        again = go_on(make, run, start=6)
    assert f"{run.checkpoint_path(7)} is damaged" in caplog.text
    assert again == whole
    assert RunFolder(run.path).latest_checkpoint() == run.checkpoint_path(7)


def test_a_full_disk_stops_the_run_and_leaves_the_last_good_checkpoint(make, whole, tmp_path):
    run = RunFolder.create(tmp_path / "run")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(step, metrics):
        if step == 3:  # no file can grow beyond this many bytes: logs still can, weights cannot
            resource.setrlimit(resource.RLIMIT_FSIZE, (6000, before[1]))

    try:
        with pytest.raises(DiskFullError, match=r"checkpoint-4 cannot be written: no space .* --resume"):
            make(run, on_step=fill).train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert steps(run) == [2]
    assert not list(run.path.glob(".*tmp*"))
    assert go_on(make, run, start=2) == whole
