"""The training engine, seen through supervised fine-tuning of a tiny decoder."""

from __future__ import annotations

import math
import random

import pytest
import torch

from proofs import by_default
from raises import raises_error
from rlhf_algos import SFTConfig, SFTTrainer
from rlhf_algos.tracking.run_facts import MACHINE_KEYS
from rlhf_data import RunFolder, TokenSequence
from rlhf_models.loading.tiny import tiny_model

VOCABULARY = 40


def _examples(count=12, seed=0):
    """Ragged sequences; every third shares a prompt with the one before it."""
    rng = random.Random(seed)
    examples = []
    for i in range(count):
        prompt = (
            list(examples[-1].input_ids[:4]) if i % 3 == 2 else [rng.randrange(VOCABULARY) for _ in range(4)]
        )
        completion = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 6))]
        examples.append(TokenSequence(prompt + completion, 4))
    return examples


def _model(**fields):
    return tiny_model("llama", vocab_size=VOCABULARY, seed=0, **fields)


def _trainer(config=None, *, model=None, **options):
    settings = {"learning_rate": 3e-3, "per_device_train_batch_size": 4, "max_steps": 4, "seed": 5}
    config = SFTConfig.from_dict(settings | (config or {}))
    return SFTTrainer(model or _model(), config, options.pop("examples", _examples()), **options)


def _history(trainer):
    rows = []
    trainer.on_step = lambda step, metrics: rows.append((step, dict(metrics)))
    trainer.train()
    return rows


def _weights(trainer):
    return [parameter.detach().clone() for parameter in trainer.parameters]


def _without_clock(rows):
    return [{name: value for name, value in row.items() if name not in MACHINE_KEYS} for row in rows]


def test_loss_is_the_mean_over_scored_tokens_and_falls():
    model, examples = _model(), _examples(4)
    expected, count = 0.0, 0
    for example in examples:  # plain forwards, one sequence at a time
        logps = model(torch.tensor([example.input_ids])).logits.log_softmax(-1)[0]
        for t in range(4, len(example.input_ids)):
            expected -= logps[t - 1, example.input_ids[t]].item()
            count += 1
    rows = _history(_trainer({"max_steps": 30, "learning_rate": 1e-2}, model=model, examples=examples))
    assert rows[0][1]["loss"] == pytest.approx(expected / count, rel=1e-5)
    assert [step for step, _ in rows] == list(range(1, 31))
    assert rows[-1][1]["loss"] < 0.3 * rows[0][1]["loss"]
    common = {"loss", "grad_norm", "learning_rate", "epoch", "num_tokens", *MACHINE_KEYS}
    assert set(rows[0][1]) == common | {"entropy", "mean_token_accuracy"}


@pytest.mark.parametrize(
    "config",
    [
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
        {"per_device_train_batch_size": 8, "max_tokens_per_batch": 1},
        {"per_device_train_batch_size": 8, "max_tokens_per_batch": 17},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_tokens_per_batch": 30},
        {"per_device_train_batch_size": 8, "max_tokens_per_batch": None},
    ],
)
def test_accumulation_and_cut_change_nothing(config):
    whole = _trainer({"per_device_train_batch_size": 8})
    cut = _trainer(config)
    expected, rows = _history(whole), _history(cut)
    for (_, a), (_, b) in zip(expected, rows, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
    for a, b in zip(_weights(whole), _weights(cut), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_budget_cuts_passes_but_keeps_every_example():
    trainer = _trainer({"max_tokens_per_batch": 17})
    batches = list(trainer.micro_batches(trainer.examples))
    assert len(batches) > 3
    assert all(batch.num_tokens <= 17 for batch, _ in batches)
    members = [id(member) for _, part in batches for member in part]
    assert sorted(members) == sorted(id(example) for example in trainer.examples)


@pytest.mark.parametrize("budget", [None, 12])
def test_tuples_of_sequences_share_their_prefix_and_count_by_token(budget):
    prompt = [5, 6, 7, 8, 9]
    family = tuple(TokenSequence([*prompt, last, last + 1], 5) for last in (11, 21, 31))
    other = TokenSequence([4, 3, 2], 1)
    config = {"max_tokens_per_batch": budget}
    grouped = _trainer(config, examples=[family, other])
    flat = _trainer(examples=[*family, other])
    together, apart = grouped.train_step(grouped.examples), flat.train_step(flat.examples)
    assert together["loss"] == pytest.approx(apart["loss"], rel=1e-5)
    assert together["num_tokens"] == 5 + 3 * 2 + 3


def test_epochs_see_each_example_once_in_an_order_of_their_own():
    seen = []
    trainer = _trainer({"num_train_epochs": 2, "max_steps": -1, "per_device_train_batch_size": 5})
    step = trainer.train_step
    trainer.train_step = lambda examples: (seen.append([id(e) for e in examples]), step(examples))[1]
    trainer.train()
    assert [len(part) for part in seen] == [5, 5, 2, 5, 5, 2]
    first, second = [*seen[0], *seen[1], *seen[2]], [*seen[3], *seen[4], *seen[5]]
    assert sorted(first) == sorted(second) == sorted(id(e) for e in trainer.examples)
    assert first != second


def test_same_seed_same_run():
    one, two, other = (_history(_trainer({"seed": seed})) for seed in (5, 5, 6))
    rows = [_without_clock([row for _, row in run]) for run in (one, two, other)]
    assert rows[0] == rows[1]
    assert rows[0] != rows[2]


@pytest.mark.parametrize("killed_after", by_default([1, 2, 3, 5], 2))
def test_resume_equals_uninterrupted(killed_after, tmp_path):
    config = {
        "max_steps": 6,
        "save_steps": 2,
        "eval_steps": 3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
    }

    def make(folder):  # dropout makes the random state matter
        model = _model(attention_dropout=0.2)
        return _trainer(
            config, model=model, eval_examples=_examples(5, seed=1), run=RunFolder(tmp_path / folder)
        )

    for folder in ("straight", "killed"):
        (tmp_path / folder).mkdir()
    straight = make("straight")
    straight.train()
    killed = make("killed")

    def kill(step, metrics):
        if step == killed_after:
            raise KeyboardInterrupt

    killed.on_step = kill
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    torch.rand(7)
    resumed = make("killed")
    assert resumed.resume() is (killed_after > 2)
    assert resumed.step == (killed_after - 1) // 2 * 2
    resumed.train()
    assert all(torch.equal(a, b) for a, b in zip(_weights(straight), _weights(resumed), strict=True))
    histories = [_without_clock(RunFolder(tmp_path / name).read_metrics()) for name in ("straight", "killed")]
    assert histories[0] == histories[1]
    assert [row["step"] for row in histories[1]] == [1, 2, 3, 4, 5, 6]
    assert ["eval_loss" in row for row in histories[1]] == [False, False, True, False, False, True]


def test_checkpoint_has_hugging_face_names_and_rolls(tmp_path):
    trainer = _trainer({"save_steps": 1, "save_total_limit": 2}, run=RunFolder(tmp_path))
    trainer.train()
    assert [step for step, _ in RunFolder(tmp_path).checkpoints()] == [3, 4]
    names = {path.name for path in (tmp_path / "checkpoint-4").iterdir()}
    assert names >= {
        *("config.json", "model.safetensors", "optimizer.safetensors"),
        *("rng_state.safetensors", "trainer_state.json"),
    }
    loaded = type(trainer.model).from_pretrained(tmp_path / "checkpoint-4").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in trainer.model.state_dict().items())


def test_adapters_resume_exactly(tmp_path):
    from peft import LoraConfig, get_peft_model

    def make(folder):
        torch.manual_seed(3)
        model = get_peft_model(_model(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        (tmp_path / folder).mkdir(exist_ok=True)
        return _trainer({"save_steps": 2}, model=model, run=RunFolder(tmp_path / folder))

    straight = make("straight")
    straight.train()
    halted = make("halted")
    halted.on_step = lambda step, metrics: (_ for _ in ()).throw(KeyboardInterrupt) if step == 3 else None
    with pytest.raises(KeyboardInterrupt):
        halted.train()
    resumed = make("halted")
    assert resumed.resume()
    resumed.train()
    assert len(resumed.parameters) == 8
    assert all(torch.equal(a, b) for a, b in zip(_weights(straight), _weights(resumed), strict=True))
    assert (tmp_path / "halted" / "checkpoint-4" / "adapter_model.safetensors").is_file()


def test_resume_with_other_data_or_model_is_refused(tmp_path):
    trainer = _trainer(run=RunFolder(tmp_path))
    trainer.train()
    with raises_error("different_training_data"):
        _trainer(run=RunFolder(tmp_path), examples=_examples(11)).resume()
    with raises_error("weights_do_not_fit"):
        _trainer(run=RunFolder(tmp_path), model=tiny_model("llama", vocab_size=VOCABULARY + 1)).resume()


def test_rows_that_changed_in_place_are_noticed(tmp_path):
    class Rows(list[TokenSequence]):
        """As a data set in memory."""

        content = "first"

    _trainer(run=RunFolder(tmp_path), examples=Rows(_examples(10))).train()
    changed = Rows(_examples(10))
    changed.content = "second"
    with raises_error("different_training_data", key="data"):
        _trainer(run=RunFolder(tmp_path), examples=changed).resume()


def test_evaluate_measures_and_leaves_the_model_as_it_was():
    trainer = _trainer(eval_examples=_examples(7, seed=1))
    before = _weights(trainer)
    trainer.model.train()
    first, again = trainer.evaluate(), trainer.evaluate()
    assert first == again
    assert set(first) == {"eval_loss", "eval_entropy", "eval_mean_token_accuracy", "eval_ref_kl"}
    assert trainer.model.training
    assert all(torch.equal(a, b) for a, b in zip(before, _weights(trainer), strict=True))
    with pytest.raises(ValueError, match="without eval_examples"):
        _trainer().evaluate()


def test_gradient_is_clipped():
    trainer = _trainer({"max_grad_norm": 0.05, "lr_scheduler_type": "constant"})
    norms = []

    def measure(*_):
        norms.append(
            math.sqrt(sum(p.grad.square().sum().item() for p in trainer.parameters if p.grad is not None))
        )

    trainer.optimizer.register_step_pre_hook(measure)
    rows = _history(trainer)
    assert norms == pytest.approx([0.05] * 4, rel=1e-3)
    assert all(metrics["grad_norm"] > 0.05 for _, metrics in rows)


def test_not_a_number_stops_the_run_with_the_weights_unchanged():
    trainer = _trainer()
    with torch.no_grad():
        trainer.parameters[0][:] = float("nan")
    others = _weights(trainer)[1:]
    with raises_error("non_finite_loss"):
        trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(others, _weights(trainer)[1:], strict=True))


def test_users_mistakes_get_one_sentence():
    with raises_error("no_training_examples"):
        _trainer(examples=[])
    with raises_error("nothing_to_learn", kind="training", index=1):
        _trainer(examples=[TokenSequence([1, 2], 1), TokenSequence([1, 2], 2)])
    with raises_error("nothing_to_learn", kind="evaluation", index=0):
        _trainer(eval_examples=[TokenSequence([1], 0)])
    with raises_error("unknown_key", key="lr_scheduler_typ"):
        SFTConfig.from_dict({"lr_scheduler_typ": "linear"})
    with pytest.raises(ValueError, match="without a run folder"):
        _trainer().save_checkpoint()
