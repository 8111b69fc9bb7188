"""The loop: exact resume from any step, batches, evaluation on the way, and what is refused."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from proofs import by_default
from raises import raises_error
from rlhf_algos.engine.events import TrainingStopped
from rlhf_data import RunFolder
from rlhf_minmax import MinMaxTrainer

CLOCK = ("step_time", "time/", "tokens_per_second", "samples_per_second", "peak_memory_gb")
DROPOUT = ("policy_model.lora_dropout=0.2", "monitor_model.lora_dropout=0.2")
FULL = ("policy_model.use_lora=false", "monitor_model.use_lora=false")
SMALL = ("training.max_steps=4", "training.batch_size=2", "game.num_generations=2", "game.num_critiques=2")
each_kind = pytest.mark.parametrize(
    "kind", [DROPOUT, pytest.param(FULL, marks=pytest.mark.slow)], ids=["lora", "full"]
)


CRITIC = (*DROPOUT, "policy_model.baseline=critic")
FEW_LABELS = (*DROPOUT, "data.train_stories=5", "data.label_share=0.2")
"""One of five stories: the others' steps measure nothing."""


@pytest.fixture
def run_kinds(everything):
    return {"lora": DROPOUT, "full": FULL, "critic": CRITIC, "everything": everything, "few": FEW_LABELS}


KINDS = [(kind, game) for kind in ("lora", "full", "critic", "everything", "few") for game in (True, False)]


@pytest.mark.slow
def test_a_policy_that_words_its_answers_otherwise_is_reported(make_game, tmp_path, scripted):
    for template, expected in ((" it is {choice} .", 0.0), ("{choice}", 1.0)):
        trainer = trainer_of(make_game, tmp_path / str(expected), f"game.answer_template='{template}'")
        prompts, records = trainer.pipeline.prompts, trainer.records
        choices = {prompts.policy(record): record.choices[0] for record in records}
        scripted(lambda prompt, sample, choices=choices: choices.get(prompt, " x y so right"))
        found: list[dict[str, Any]] = [trainer.train_step() for _ in range(4)]
        assert [row["policy/form_match"] for row in found] == [expected] * 4
        told = [text for row in found for text in row.get("findings", ()) if "game.answer_template" in text]
        assert len(told) == (expected == 0)
        assert all(any(repr(choice) in text for choice in choices.values()) for text in told)


@pytest.mark.slow
def test_a_monitor_that_is_never_trained_leaves_its_multiplier_and_the_doctor_alone(make_game, tmp_path):
    never = ("training.monitor_updates_per_policy=0", "training.max_steps=18", "game.policy_critiques=0")
    trainer = trainer_of(make_game, tmp_path, *never, "constraint.lambda_max=5.1")
    rows: list[dict[str, Any]] = [trainer.train_step() for _ in range(18)]
    # Violations stay far above 0.05, and a rising λ would have met its bound in the first step.
    assert min(row["constraint/violation_ema"] for row in rows) > 0.1
    assert {row["dual/lambda"] for row in rows} == {5.0} and not any(row["dual/saturated"] for row in rows)
    told = " ".join(text for row in rows for text in row.get("findings", ()))
    assert "constraint.lambda_max" not in told and "stood still" not in told and "as far as" not in told


class Killed(Exception):
    """Stands for a kill after some step."""


def trainer_of(make_game, folder, *overrides, adversary=True, die_after=None):
    """A trainer on fresh players, in a run folder; it raises `Killed` after a step is logged and saved."""
    pipeline, stories = make_game(*SMALL, *overrides)

    def on_step(step, total, metrics):
        if step == die_after:
            raise Killed

    run = RunFolder.create(folder, resume=True)
    return MinMaxTrainer(
        pipeline,
        pipeline.config,
        stories.train[:5],
        stories.held_out[:4],
        run=run,
        adversary=adversary,
        on_step=on_step,
    )


def rows(folder):
    """Metrics without the wall clock."""
    return [
        {k: v for k, v in row.items() if not k.startswith(CLOCK)} for row in RunFolder(folder).read_metrics()
    ]


def weights(trainer):
    players = trainer.pipeline.players
    return [p.detach().clone() for player in (players.policy, players.monitor) for p in player.parameters()]


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# Labels are of the game; without an adversary few are as good as many.
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    by_default(
        KINDS, ("lora", True), ("few", False), proofs=[("full", True), ("few", True), ("lora", False)]
    ),
    ids=str,
)
def test_killed_after_every_step_and_resumed_equals_uninterrupted(make_game, tmp_path, run_kinds, case):
    kind, settings = run_kinds[case[0]], {"adversary": case[1]}
    whole = trainer_of(make_game, tmp_path / "whole", *kind, **settings)
    start = weights(whole)
    whole.train()
    assert not equal(start, weights(whole))
    for step in range(1, whole.total_steps):
        part = trainer_of(make_game, tmp_path / "parts", *kind, **settings, die_after=step)
        assert part.resume() == (step > 1)
        with pytest.raises(Killed):
            part.train()
    last = trainer_of(make_game, tmp_path / "parts", *kind, **settings)
    assert last.resume() and last.step == last.total_steps - 1
    last.train()
    assert rows(tmp_path / "whole") == rows(tmp_path / "parts")
    assert [row["step"] for row in rows(tmp_path / "parts")] == list(range(1, whole.total_steps + 1))
    assert equal(weights(whole), weights(last))
    assert last.optimizer.dual == whole.optimizer.dual


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_ends_the_step_and_is_resumed_from(make_game, tmp_path, capfd, number, code):
    rare = ("training.save_steps=null", *DROPOUT)
    whole = trainer_of(make_game, tmp_path / "whole", *rare)
    whole.train()
    stopped = trainer_of(make_game, tmp_path / "parts", *rare)
    stopped.on_step = lambda step, *_: signal.raise_signal(number) if step == 1 else None  # seen after step 2
    with pytest.raises(TrainingStopped) as stop:
        stopped.train()
    assert stop.value.exit_code == code
    assert f"{signal.Signals(number).name}: finishing this step and saving" in capfd.readouterr().err
    assert [step for step, _ in RunFolder(tmp_path / "parts").checkpoints()] == [2]
    resumed = trainer_of(make_game, tmp_path / "parts", *rare)
    assert resumed.resume() and resumed.step == 2
    resumed.train()
    assert rows(tmp_path / "whole") == rows(tmp_path / "parts")
    assert equal(weights(whole), weights(resumed))


@pytest.mark.slow
@each_kind
def test_steps_after_the_last_checkpoint_are_played_again(make_game, tmp_path, kind):
    sparse = ("training.save_steps=2", *kind)
    whole = trainer_of(make_game, tmp_path / "whole", *sparse)
    whole.train()
    killed = trainer_of(make_game, tmp_path / "parts", *sparse, die_after=3)
    with pytest.raises(Killed):
        killed.train()
    assert len(rows(tmp_path / "parts")) == 3
    with open(tmp_path / "parts" / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    resumed = trainer_of(make_game, tmp_path / "parts", *sparse)
    assert resumed.resume() and resumed.step == 2 and len(rows(tmp_path / "parts")) == 2
    resumed.train()
    assert rows(tmp_path / "whole") == rows(tmp_path / "parts")
    assert equal(weights(whole), weights(resumed))


@pytest.mark.slow
def test_a_checkpoint_half_written_is_not_resumed_from(make_game, tmp_path):
    trainer = trainer_of(make_game, tmp_path, "training.max_steps=2")
    trainer.train()
    Path(tmp_path / "checkpoint-2" / "trainer_state.json").unlink()
    again = trainer_of(make_game, tmp_path, "training.max_steps=2")
    assert again.resume() and again.step == 1 and len(rows(tmp_path)) == 1
    again.train()
    assert equal(weights(trainer), weights(again))


@pytest.mark.slow
def test_saving_and_evaluating_change_nothing(make_game, tmp_path):
    often = trainer_of(make_game, tmp_path / "often", "training.eval_steps=1", *DROPOUT)
    never = trainer_of(make_game, tmp_path / "never", "training.save_steps=null", *DROPOUT)
    often.train()
    never.train()
    assert equal(weights(often), weights(never))
    stripped = [
        {k: v for k, v in row.items() if not k.startswith("eval_")} for row in rows(tmp_path / "often")
    ]
    assert stripped == rows(tmp_path / "never")
    assert all("eval_policy/accuracy" in row for row in rows(tmp_path / "often"))
    assert [step for step, _ in RunFolder(tmp_path / "never").checkpoints()] == [4]
    assert [step for step, _ in RunFolder(tmp_path / "often").checkpoints()] == [3, 4]


@pytest.mark.slow
def test_plain_training_leaves_the_monitor_alone_and_makes_as_many_policy_updates(make_game, tmp_path):
    game = trainer_of(make_game, tmp_path / "game", "training.monitor_warmup_steps=2")
    plain = trainer_of(make_game, tmp_path / "plain", "training.monitor_warmup_steps=2", adversary=False)
    monitor = [p.detach().clone() for p in plain.pipeline.players.monitor.parameters()]
    game.train()
    plain.train()
    learned = [row for row in rows(tmp_path / "game") if "policy/updates" in row]
    assert [row["step"] for row in learned] == [3, 4] and plain.total_steps == 2
    assert equal(monitor, list(plain.pipeline.players.monitor.parameters()))
    assert {row["phase"] for row in rows(tmp_path / "plain")} == {"plain"}
    assert not any(key.startswith(("monitor/", "dual/")) for row in rows(tmp_path / "plain") for key in row)


@pytest.mark.slow
def test_an_epoch_visits_every_story_once(make_game, tmp_path):
    trainer = trainer_of(make_game, tmp_path, "training.max_steps=6")
    seen = []
    forward = type(trainer.pipeline).forward_pass
    # 5 stories in batches of 2, 2, 1; then the next epoch in another order.
    trainer.pipeline.forward_pass = lambda batch, **more: (
        seen.append([r.story for r in batch]) or forward(trainer.pipeline, batch, **more)
    )
    trainer.train()
    assert [len(batch) for batch in seen] == [2, 2, 1, 2, 2, 1]
    first, second = ([story for batch in part for story in batch] for part in (seen[:3], seen[3:]))
    assert sorted(first) == sorted(second) == sorted(r.story for r in trainer.records)
    assert first != second


def test_steps_from_epochs(make_game, tmp_path):
    trainer = trainer_of(make_game, tmp_path, "training.max_steps=-1", "training.num_epochs=2")
    assert trainer.total_steps == 6  # ceil(5 / 2) = 3 a pass


@pytest.mark.slow
def test_metrics_rows_hold_what_a_reader_needs(make_game, tmp_path):
    trainer_of(make_game, tmp_path).train()
    row = RunFolder(tmp_path).read_metrics()[-1]
    expected = {"step", "loss", "step_time", "num_tokens", "learning_rate", "grad_norm", "phase", "epoch"}
    expected |= {"policy/accuracy", "minmax/value", "dual/lambda", "constraint/violation_ema"}
    expected |= {"monitor/updates", "monitor/frac_groups_zero_std", "policy/kl", "monitor/truncated_rate"}
    assert expected <= set(row)
    parts = ("answers", "critiques", "score", "monitor_update", "policy_update")
    spent = [row[f"time/{part}"] for part in parts]
    assert min(spent) > 0 and sum(spent) < row["step_time"] and row["tokens_per_second"] > 0
    tokens = [r["num_tokens"] for r in RunFolder(tmp_path).read_metrics()]
    assert tokens == sorted(tokens) and tokens[0] > 0


def test_other_data_is_refused_on_resume(make_game, tmp_path):
    trainer_of(make_game, tmp_path, "training.max_steps=1").train()
    pipeline, stories = make_game(*SMALL)
    other = MinMaxTrainer(pipeline, pipeline.config, stories.train[:6], run=RunFolder(tmp_path))
    with raises_error("different_training_data"):
        other.resume()


def test_no_stories_are_refused(game):
    pipeline, _ = game
    with raises_error("no_training_examples"):
        MinMaxTrainer(pipeline, pipeline.config, [])
