"""Training on rows that stay on disk: what is held out, mixtures, bad rows, other numbers of processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from raises import raises_error
from rlhf_algos import METHODS
from rlhf_algos.configs.offline import SFTConfig
from rlhf_algos.jobs.data import build_sets, load_rows, tell_left_out
from rlhf_algos.offline.sft import SFTTrainer
from rlhf_algos.tracking.run_facts import MACHINE_KEYS
from rlhf_data import RunFolder, StreamingSFTDataset, UserError, prompt_key
from rlhf_models import RewardModel, tiny_model

WORKER = Path(__file__).with_name("streaming_worker.py")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def sets(tokenizer: Any, data: Path, **settings: Any) -> tuple[Any, Any]:
    method = METHODS["sft"]
    config = method.resolve({"train_data": str(data), "streaming": True, **settings})
    return build_sets(method, config, load_rows(method, config), tokenizer, max_length=None)


def prompts(tokenizer: Any, examples: Any) -> list[str]:
    return [tokenizer.decode(each.input_ids).split("|")[0] for each in examples]


def rows(count: int, name: str = "p") -> list[dict[str, str]]:
    """Each prompt twice."""
    return [{"prompt": f"{name}{i // 2}|", "completion": f" {i}"} for i in range(count)]


def test_no_prompt_is_both_trained_on_and_held_out(tmp_path: Path, byte_tokenizer: Any) -> None:
    path = written(tmp_path / "a.jsonl", rows(400))
    train, held_out = sets(byte_tokenizer, path, eval_fraction=0.2, streaming_eval_rows=30)
    trained, held = set(prompts(byte_tokenizer, train)), prompts(byte_tokenizer, held_out)
    assert len(held) == 30 and not trained & set(held)
    # The same prompts as of a set in memory; those beyond the limit are not trained on either.
    memory = load_rows(
        METHODS["sft"], METHODS["sft"].resolve({"train_data": str(path), "eval_fraction": 0.2})
    )
    assert trained == {json.loads(prompt_key(each)).split("|")[0] for each in memory.train}
    assert len(train) == 400 and not train.bad.numbers and not train.dropped.numbers
    assert len(sets(byte_tokenizer, path, eval_fraction=0)[1]) == 0


def test_a_mixture_is_a_file_of_sources_with_weights(tmp_path: Path, byte_tokenizer: Any) -> None:
    written(tmp_path / "a.jsonl", rows(90, "a"))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows(10, "b")), tmp_path / "b.parquet")
    other = [{"q": f"c{i}|", "completion": " x"} for i in range(100)]
    written(tmp_path / "c.jsonl", other)
    mixture = tmp_path / "mix.yaml"
    mixture.write_text(
        "sources:\n- path: a.jsonl\n  weight: 2\n- path: b.parquet\n"
        "- path: c.jsonl\n  weight: 5\n  columns: {prompt: q}\n"
    )
    train, held_out = sets(byte_tokenizer, mixture, eval_fraction=0)
    found = prompts(
        byte_tokenizer,
        train.fetch(train.order(0, seed=1)[:80])
        and [example for (example,) in train.fetch(train.order(0, seed=1)[:80])],
    )
    assert [sum(each.startswith(name) for each in found) for name in "abc"] == [20, 10, 50]
    assert len(train) == 200 and not held_out
    mixture.write_text("sources:\n- path: a.jsonl\n  weight: -1\n")
    with pytest.raises(UserError, match="sources"):
        sets(byte_tokenizer, mixture)
    with raises_error("invalid_value", key="subset_size"):
        sets(byte_tokenizer, mixture, subset_size=3)


@pytest.mark.parametrize("ties", ["drop", "margin0"])
def test_ties_are_settled_as_in_memory(
    tmp_path: Path, byte_tokenizer: Any, caplog: pytest.LogCaptureFixture, ties: str
) -> None:
    pairs = [
        {"prompt": f"p{i}", "chosen": f" {i}", "rejected": f"  {i}" if i == 5 else f" no {i}", "margin": 2}
        for i in range(8)
    ]
    path, method = written(tmp_path / "a.jsonl", pairs), METHODS["reward"]
    found = []
    for streaming in (False, True):
        settings = {"train_data": str(path), "eval_fraction": 0, "ties": ties, "streaming": streaming}
        config = method.resolve(settings)
        rows = load_rows(method, config)
        train, _ = build_sets(method, config, rows, byte_tokenizer, max_length=None)
        found.append(list(train))
        assert tell_left_out(train) == ({"bad_rows": 0, "dropped_rows": 0} if streaming else {})
    assert found[0] == found[1]
    assert [pair.margin for pair in found[1]] == ([2] * 7 if ties == "drop" else [2] * 5 + [0] + [2] * 2)
    assert ("ties that came: 1" in caplog.text) == (ties == "drop")
    with raises_error("invalid_value"):
        sets(
            byte_tokenizer, written(tmp_path / "sft.jsonl", [{"prompt": "p", "completion": " a"}]), ties=ties
        )


def test_bad_rows_make_their_step_smaller_and_nothing_else(
    tmp_path: Path, byte_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    good = rows(12)
    path = written(tmp_path / "a.jsonl", [*good[:4], "broken\n", *good[4:7], "broken\n" * 4, *good[7:]])
    examples = StreamingSFTDataset(path, byte_tokenizer, on_bad_row="skip")
    settings = {"per_device_train_batch_size": 4, "shuffle": False, "num_train_epochs": 1.0}
    trainer = SFTTrainer(
        tiny_model("llama", vocab_size=len(byte_tokenizer), seed=0), SFTConfig.from_dict(settings), examples
    )
    losses: list[float | None] = []
    trainer.on_step = lambda step, metrics: losses.append(metrics.get("loss"))
    with caplog.at_level("INFO", logger="rlhf_algos"):
        trainer.train()
    assert len(losses) == 5 and losses[2] is None  # rows 8 to 11 are all bad
    assert [each for each in caplog.messages if "no update" in each] == [
        "step 3: no update, because every row is held out, bad or dropped"
    ]
    by_hand = SFTTrainer(
        tiny_model("llama", vocab_size=len(byte_tokenizer), seed=0),
        SFTConfig.from_dict({**settings, "max_steps": 5}),
        list(examples),
    )
    expected = [by_hand.train_step(list(examples)[part]) for part in (slice(0, 4), slice(4, 7))]
    assert losses[:2] == [each["loss"] for each in expected]


def test_a_bad_row_that_is_an_error_stops_at_its_step(tmp_path: Path, byte_tokenizer: Any) -> None:
    path = written(tmp_path / "a.jsonl", [*rows(100), "broken\n"])
    config = SFTConfig.from_dict({"per_device_train_batch_size": 50, "shuffle": False})
    model = tiny_model("llama", vocab_size=len(byte_tokenizer), seed=0)
    trainer = SFTTrainer(model, config, StreamingSFTDataset(path, byte_tokenizer))
    with raises_error("invalid_json"):
        trainer.train()
    assert trainer.step == 2


def test_a_checkpoint_wants_as_many_rows_in_a_step(tmp_path: Path, byte_tokenizer: Any) -> None:
    path = written(tmp_path / "a.jsonl", rows(12))
    made = {}
    for size, accumulate in ((4, 1), (2, 2), (2, 1)):
        config = SFTConfig.from_dict(
            {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulate, "max_steps": 2}
        )
        model = tiny_model("llama", vocab_size=len(byte_tokenizer), seed=0)
        run = RunFolder.create(tmp_path / "run", resume=True)
        made[size, accumulate] = SFTTrainer(model, config, StreamingSFTDataset(path, byte_tokenizer), run=run)
    made[4, 1].train()
    assert made[2, 2].resume() and made[2, 2].step == 2
    with raises_error("different_training_data"):
        made[2, 1].resume()


def test_a_checkpoint_wants_the_rows_it_was_written_with(tmp_path: Path, byte_tokenizer: Any) -> None:
    path = written(tmp_path / "a.jsonl", rows(6))

    def trainer(data: Path) -> SFTTrainer:
        config = SFTConfig.from_dict({"per_device_train_batch_size": 2, "max_steps": 2})
        model = tiny_model("llama", vocab_size=len(byte_tokenizer), seed=0)
        run = RunFolder.create(tmp_path / "run", resume=True)
        return SFTTrainer(model, config, StreamingSFTDataset(data, byte_tokenizer), run=run)

    trainer(path).train()
    (tmp_path / "moved").mkdir()
    assert trainer(written(tmp_path / "moved" / "b.jsonl", rows(6))).resume()
    with raises_error("different_training_data", key="data"):
        trainer(written(path, rows(6, "q"))).resume()


def test_rows_left_out_before_a_resume_stay_counted_once(tmp_path: Path, byte_tokenizer: Any) -> None:
    """Of each half 2 rows are bad, 1 is too long and 1 a tie; the second epoch meets all of them again."""
    pairs: list[Any] = [{"prompt": f"p{i}", "chosen": f" {i}", "rejected": f" no {i}"} for i in range(20)]
    for half in (0, 10):
        pairs[half + 1]["prompt"] = "long" * 40
        pairs[half + 2]["rejected"] = f"  {half + 2}"
    path = written(tmp_path / "a.jsonl", [*pairs[:10], *["broken\n"] * 2, *pairs[10:], *["broken\n"] * 2])
    method = METHODS["reward"]

    def counted(steps: int) -> tuple[dict[str, int], Any]:
        values = {"train_data": str(path), "eval_fraction": 0, "ties": "drop", "on_bad_row": "skip"}
        values |= {"streaming": True, "per_device_train_batch_size": 12, "shuffle": False, "max_steps": steps}
        config = method.resolve(values)
        found = load_rows(method, config)
        train, _ = build_sets(method, config, found, byte_tokenizer, max_length=60)
        model = tiny_model("llama", vocab_size=len(byte_tokenizer), seed=0)
        trainer: Any = method.trainer_class(
            RewardModel.from_backbone(model, byte_tokenizer, seed=0),
            config,
            train,
            run=RunFolder.create(tmp_path / "run", resume=True),
        )
        trainer.resume()
        trainer.train()
        return tell_left_out(train), trainer.examples.left_out["ties"]

    first, ties = counted(1)
    assert first == {"bad_rows": 2, "dropped_rows": 1} and len(ties.numbers) == 1
    for steps in (2, 4):
        both, ties = counted(steps)
        assert both == {"bad_rows": 4, "dropped_rows": 2} and len(ties.numbers) == 2
        assert len(ties.messages) == 2


@pytest.mark.slow
@pytest.mark.proof
def test_other_numbers_of_processes_and_kills_give_the_same_losses(
    run_processes: Callable[..., str], tmp_path: Path
) -> None:
    """One process; two; two that stop after two steps, taken up by one, which stops, and by three."""
    data = tmp_path / "data"
    data.mkdir()
    pairs: list[Any] = [{"prompt": f"p{i}", "chosen": f" {i}", "rejected": f" no {i}"} for i in range(40)]
    pairs[5]["prompt"] = "long" * 40
    for kind in ("preference", "kto", "sft"):
        made = (
            [{"prompt": each["prompt"], "completion": each["chosen"]} for each in pairs]
            if kind == "sft"
            else pairs
        )
        written(data / f"{kind}-0.jsonl", [*made[:20], "broken\n", "\n"])
        written(data / f"{kind}-1.jsonl", made[20:])

    def train(folder: str, steps: int, processes: int, *options: str) -> None:
        run_processes([WORKER, data, tmp_path / folder, steps, *options], processes=processes)

    train("one", 8, 1)
    train("two", 8, 2)
    for steps, processes in ((2, 2), (4, 1), (8, 3)):
        train("moved", steps, processes, *(["resume"] if steps > 2 else []))

    def logged(folder: str, name: str) -> list[dict[str, float]]:
        found = RunFolder(tmp_path / folder / name).read_metrics()
        return [{k: v for k, v in row.items() if k not in {*MACHINE_KEYS, "num_tokens"}} for row in found]

    for name in ("sft", "dpo", "kto"):
        expected = logged("one", name)
        assert len(expected) == 8
        for folder in ("two", "moved"):
            for row, other in zip(logged(folder, name), expected, strict=True):
                assert row == pytest.approx(other, rel=2e-4, abs=5e-6), (folder, name)
