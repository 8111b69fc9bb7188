"""Around the steps: stopping early or by a signal, the best checkpoint, data order, debug switches."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch

from raises import raises_error
from rlhf_algos import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from rlhf_algos.engine.events import TrainingStopped
from rlhf_algos.engine.loss_output import LossOutput, reduce_outputs
from rlhf_algos.engine.optimizer_step import epoch_order
from rlhf_algos.tracking.step_report import Pace
from rlhf_data import RunFolder, TokenSequence, UserError, micro_batches
from rlhf_models import RewardModel
from rlhf_models.loading.tiny import tiny_model, train_byte_tokenizer

ROWS = [TokenSequence([1 + i % 5, 2 + i % 7, i % 11, (3 * i) % 13, 4], 2) for i in range(12)]
OTHER = [TokenSequence([9, 9, 1 + i, 15, 14, 13], 2) for i in range(3)]


def make(run=None, *, rows=ROWS, **settings):
    config = {"learning_rate": 1e-2, "per_device_train_batch_size": 4, "max_steps": 6}
    options = {
        name: settings.pop(name) for name in ("eval_examples", "tokenizer", "on_step") if name in settings
    }
    model = tiny_model("llama", vocab_size=300, seed=0)
    return SFTTrainer(model, SFTConfig.from_dict(config | settings), rows, run=run, **options)


def losses(run):
    return [row["loss"] for row in run.read_metrics()]


def weights(trainer):
    return [parameter.detach().clone() for parameter in trainer.parameters]


def test_reports_say_pace_evaluation_and_checkpoint_of_every_step(tmp_path):
    run, reports = RunFolder.create(tmp_path / "run"), []
    settings = {"eval_examples": OTHER, "eval_steps": 3, "save_steps": 4, "logging_steps": 2}
    trainer = make(run, **settings)
    trainer.on_report = reports.append
    trainer.train()
    assert [(each.step, each.total) for each in reports] == [(step, 6) for step in range(1, 7)]
    assert (
        [each.step for each in reports if each.logged]
        == [2, 3, 4, 6]
        == [row["step"] for row in run.read_metrics()]
    )
    assert [each.step for each in reports if each.evaluation] == [3, 6]
    assert reports[2].evaluation == {k: v for k, v in reports[2].metrics.items() if k.startswith("eval_")}
    assert [each.checkpoint for each in reports] == [
        *[None] * 3, run.path / "checkpoint-4", None, run.path / "checkpoint-6"
    ]  # fmt: skip
    for each in reports:
        assert {"learning_rate", "grad_norm", "loss"} <= set(each.metrics)
        assert each.tokens_per_second > 0
        assert each.seconds_left == pytest.approx((6 - each.step) * each.seconds / each.step)
    assert [each.seconds for each in reports] == sorted(each.seconds for each in reports)


def test_the_pace_of_a_resumed_run_is_its_own(tmp_path, monkeypatch):
    now = iter([100.0, 104.0, 110.0])
    monkeypatch.setattr("rlhf_algos.tracking.step_report.time.perf_counter", lambda: next(now))
    pace = Pace(20, step=10, num_tokens=1000)
    first = pace.report(12, {"num_tokens": 1400})
    assert (first.seconds, first.tokens_per_second) == (4, 100)
    assert first.seconds_left == 16  # 8 steps at 2 s
    second = pace.report(15, {"num_tokens": 1700})
    assert second.tokens_per_second == 50  # 300 tokens in the 6 s since the last one
    assert second.seconds_left == 10  # 5 steps at 10 s / 5


def test_shuffle_off_takes_the_examples_as_they_come():
    taken = []
    trainer = make(shuffle=False, max_steps=5)
    step = trainer.train_step
    trainer.train_step = lambda examples: (taken.append(list(examples)), step(examples))[1]
    trainer.train()
    assert taken == [ROWS[0:4], ROWS[4:8], ROWS[8:12], ROWS[0:4], ROWS[4:8]]


def test_order_depends_on_seed_and_epoch_only():
    first = epoch_order(20, 0, shuffle=True, seed=3)
    assert sorted(first) == list(range(20)) and first == epoch_order(20, 0, shuffle=True, seed=3)
    assert first != epoch_order(20, 1, shuffle=True, seed=3) != epoch_order(20, 0, shuffle=True, seed=9)


def test_nothing_is_cut_into_nothing():
    assert not list(micro_batches([], [], 10)) and not list(micro_batches([], [], None))


def test_metrics_add_up_over_micro_batches_that_count():
    def output(value):
        x = torch.tensor(float(value))
        return LossOutput(x, {"a": 2 * x}, {"m": (x, torch.tensor(2.0))}, {"low": x}, {"high": x})

    # Terms 4 and 6 of two micro-batches that count, 100 of one that does not.
    outputs = [(output(100), False), (output(4), True), (output(6), True)]
    metrics = reduce_outputs(
        outputs, 5, add=lambda x: x, maximum=lambda x: x, others={"norm": torch.tensor(3.0)}
    )
    assert metrics == {"loss": 2.0, "a": 4.0, "m": 2.5, "low": 4.0, "high": 6.0, "norm": 3.0}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_stops_and_can_be_resumed_to_the_bit(tmp_path, capfd, number):
    whole = RunFolder.create(tmp_path / "whole")
    make(whole).train()

    def interrupt(step, metrics):
        if step == 2:
            os.kill(os.getpid(), number)

    run = RunFolder.create(tmp_path / "stopped")
    with pytest.raises(TrainingStopped) as stopped:
        make(run, on_step=interrupt).train()
    assert stopped.value.exit_code == 128 + number
    assert "saving" in capfd.readouterr().err
    assert [step for step, _ in run.checkpoints()] == [2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    again = make(run)
    assert again.resume() and again.step == 2
    again.train()
    assert losses(run) == losses(whole)


def test_stops_early_and_keeps_the_best(tmp_path):
    run = RunFolder.create(tmp_path / "run")
    settings = {
        "eval_examples": OTHER,  # unlike the training rows: their loss rises in the end
        "eval_steps": 1,
        "max_steps": 60,
        "learning_rate": 3e-2,
        "early_stopping_patience": 2,
        "load_best_model_at_end": True,
        "save_total_limit": 1,
    }
    trainer = make(run, **settings)
    trainer.train()
    history = [row["eval_loss"] for row in run.read_metrics()]
    best = min(range(len(history)), key=history.__getitem__)
    assert len(history) == best + 3 < 60
    assert trainer.evaluate()["eval_loss"] == pytest.approx(history[best], rel=1e-6)
    assert [step for step, _ in run.checkpoints()] == [best + 1, len(history)]
    state = json.loads((run.checkpoint_path(len(history)) / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == f"checkpoint-{best + 1}"
    assert state["best_metric"] == pytest.approx(history[best])


def test_resumed_run_remembers_its_bad_evaluations(tmp_path):
    settings = {
        "eval_examples": OTHER,
        "eval_steps": 1,
        "max_steps": 60,
        "learning_rate": 3e-2,
        "early_stopping_patience": 3,
        "save_steps": 1,
        "save_total_limit": None,
    }
    whole = RunFolder.create(tmp_path / "whole")
    make(whole, **settings).train()
    steps = len(losses(whole))

    def interrupt(step, metrics):
        if step == steps - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    run = RunFolder.create(tmp_path / "run")
    with pytest.raises(TrainingStopped):
        make(run, on_step=interrupt, **settings).train()
    again = make(run, **settings)
    again.resume()
    again.train()
    assert losses(run) == losses(whole)


def test_an_early_stop_leaves_a_checkpoint_of_its_last_step(tmp_path):
    run = RunFolder.create(tmp_path / "run")
    settings = {"eval_steps": 1, "early_stopping_patience": 1, "learning_rate": 1.0, "max_steps": 60}
    trainer = make(run, eval_examples=OTHER, **settings)
    trainer.train()
    assert trainer.step < 60 and [step for step, _ in run.checkpoints()] == [trainer.step]


@pytest.mark.parametrize(
    ("settings", "code", "missing"),
    [
        ({"early_stopping_patience": 1, "eval_steps": 2}, "missing_evaluation", "held-out rows"),
        ({"load_best_model_at_end": True, "eval_steps": 2}, "missing_evaluation", "held-out rows"),
        ({"early_stopping_patience": 1, "eval_examples": OTHER}, "missing_evaluation", "eval_steps"),
        (
            {"load_best_model_at_end": True, "eval_steps": 2, "eval_examples": OTHER},
            "missing_run_folder",
            None,
        ),
    ],
)
def test_comparing_evaluations_that_there_will_not_be_is_refused(settings, code, missing):
    with raises_error(code, missing=missing):
        make(**settings)


def test_an_epoch_can_be_trained_by_itself(tmp_path):
    whole = RunFolder.create(tmp_path / "whole")
    make(whole).train()
    run = RunFolder.create(tmp_path / "run")
    trainer = make(run)
    first = trainer.train_epoch()
    assert trainer.step == 3 and first["loss"] == losses(whole)[2]
    trainer.train_epoch()
    assert losses(run) == losses(whole) and trainer.train_epoch() == {}


def test_unknown_best_metric_is_refused_by_name(tmp_path):
    trainer = make(
        RunFolder.create(tmp_path / "run"), eval_examples=OTHER, metric_for_best_model="bleu", max_steps=1
    )
    with raises_error("unknown_metric", metric="eval_bleu"):
        trainer.train()


def test_best_model_of_a_sharded_run_is_refused():
    with pytest.raises(UserError, match="load_best_model_at_end"):
        SFTConfig.from_dict({"load_best_model_at_end": True, "fsdp": True})


@pytest.mark.slow
def test_debug_switches_write_and_draw(tmp_path):
    run = RunFolder.create(tmp_path / "run")
    tokenizer = train_byte_tokenizer(["some text"], vocab_size=300)
    plain = make(max_steps=4)
    plain.train()
    debugged = make(
        run, tokenizer=tokenizer, max_steps=4, debug_gradient_flow=2, debug_activations=2, sample_steps=2
    )
    debugged.train()
    for mine, its in zip(weights(debugged), weights(plain), strict=True):
        assert torch.equal(mine, its)
    assert {row["step"] for row in run.read_lines("gradient_flow.jsonl")} == {2, 4}
    assert {row["step"] for row in run.read_lines("activations.jsonl")} == {2, 4}
    assert {row["step"] for row in run.read_lines("samples.jsonl")} == {2, 4}
    for name in ("gradient_flow.png", "activations.png"):
        assert (run.path / name).read_bytes().startswith(b"\x89PNG")


def test_samples_of_a_reward_model_are_refused(tmp_path):
    tokenizer = train_byte_tokenizer(["some text"], vocab_size=300)
    lm = tiny_model("llama", vocab_size=len(tokenizer), seed=0)
    pairs = [(TokenSequence([1, 2, 3], 1), TokenSequence([1, 2, 4], 1))]
    config = RewardConfig(sample_steps=1, max_steps=1)
    trainer = RewardTrainer(
        RewardModel.from_backbone(lm, tokenizer), config, pairs, run=RunFolder.create(tmp_path / "run")
    )
    with raises_error("unsupported_key", key="sample_steps"):
        trainer.train()


def test_trackers_get_every_logged_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = RunFolder.create(tmp_path / "run")
    make(run, report_to=("tensorboard",), logging_steps=2, max_steps=6).train()
    assert [row["step"] for row in run.read_metrics()] == [2, 4, 6]
    (folder,) = {path.parent for path in run.path.glob("tensorboard/**/events*")}
    events = EventAccumulator(str(folder))
    events.Reload()
    name = next(tag for tag in events.Tags()["scalars"] if tag.endswith("loss"))
    assert [scalar.step for scalar in events.Scalars(name)] == [2, 4, 6]


def test_gradient_checkpointing_changes_nothing_but_memory():
    plain, checkpointed = make(), make(gradient_checkpointing=True)
    assert not plain.model.is_gradient_checkpointing and checkpointed.model.is_gradient_checkpointing
    for trainer in (plain, checkpointed):
        trainer.train()
    for mine, its in zip(weights(checkpointed), weights(plain), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-6)


def test_compiles_what_lies_beside_attention(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: compiled.append(self))
    make(torch_compile=True)
    assert {type(module).__name__ for module in compiled} == {"LlamaMLP", "LlamaRMSNorm"}


def test_eight_bit_optimizer_of_a_sharded_run_is_refused():
    with pytest.raises(UserError, match="adamw_bnb_8bit"):
        SFTConfig.from_dict({"optim": "adamw_bnb_8bit", "fsdp": True})


def test_saving_shows_no_bar_for_each_file(tmp_path, capfd):
    make().save_model(tmp_path / "model")
    assert "shards" not in capfd.readouterr().err


def test_a_run_killed_after_its_last_evaluation_does_not_go_on(tmp_path):
    run = RunFolder.create(tmp_path / "run")
    settings = {
        "eval_examples": OTHER,
        "eval_steps": 1,
        "max_steps": 60,
        "learning_rate": 3e-2,
        "early_stopping_patience": 2,
        "save_steps": 1,
    }
    make(run, **settings).train()
    history = losses(run)
    assert len(history) < 60
    again = make(run, **settings)  # its checkpoint is there, what a job does after training is not
    assert again.resume() and again.train() == {}
    assert losses(run) == history
