"""Rows of every format and every fault, given to the offline commands: used, or refused in one sentence."""

from __future__ import annotations

import copy
import csv
import gzip
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from files import done, read_json
from proofs import by_default
from rlhf_data import load_records

Train = Callable[..., Result]
Refused = Callable[..., str]
HH = Path(__file__).parents[3] / "shared" / "data" / "hh-rlhf" / "harmless-base-1500.jsonl.gz"
SMALL = ("--max-steps=2", "--set=learning_rate=1e-3", "--set=per_device_train_batch_size=4")
PAIRS = [
    {"prompt": f"where is the {thing} ?", "chosen": " in the kitchen .", "rejected": " in the shed ."}
    for thing in ("ball", "book", "key", "cat", "hat", "cup", "pen", "map", "box", "bag", "fan", "jug")
]
GOOD = b'{"prompt": "p", "chosen": "a", "rejected": "b"}\n'


def lines_of(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def losses(run: str) -> list[float]:
    return [json.loads(line)["loss"] for line in Path(run, "metrics.jsonl").read_text().splitlines()]


def write_formats(folder: Path) -> list[Path]:
    """The same pairs as JSON lines, gzipped, JSON, CSV, Parquet and a folder that `datasets` saved."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    (folder / "rows.jsonl").write_bytes(lines_of(PAIRS))
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines_of(PAIRS)))
    (folder / "rows.json").write_text(json.dumps(PAIRS))
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(PAIRS[0]))
        writer.writeheader()
        writer.writerows(PAIRS)
    datasets.disable_progress_bars()
    table = datasets.Dataset.from_list(PAIRS)
    table.to_parquet(folder / "rows.parquet")
    table.save_to_disk(folder / "saved")
    names = ("rows.jsonl", "rows.jsonl.gz", "rows.json", "rows.csv", "rows.parquet", "saved")
    return [folder / name for name in names]


@pytest.mark.slow
def test_every_format_gives_the_same_training(train: Train, tmp_path: Path, tiny_model_folder: Path) -> None:
    found = []
    for path in write_formats(tmp_path):
        options = ("--model", tiny_model_folder, "--train-data", path, *SMALL)
        done(train("dpo", *options, f"--output-dir={path.name}-run"))
        found.append(losses(f"{path.name}-run"))
    assert len(found) == 6 and all(each == found[0] for each in found)


def test_other_column_names_and_message_lists(train: Train, tmp_path: Path, tiny_model_folder: Path) -> None:
    rows = [
        {
            "question": [{"role": "user", "content": row["prompt"]}],
            "better": [{"role": "assistant", "content": row["chosen"]}],
            "worse": [{"role": "assistant", "content": row["rejected"]}],
        }
        for row in PAIRS
    ]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines_of(rows))
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    (tiny_model_folder / "chat_template.jinja").write_text(template)
    columns = [f"--set=columns.{name}" for name in ("prompt=question", "chosen=better", "rejected=worse")]
    for method in ("reward", "dpo"):
        options = ("--model", tiny_model_folder, "--train-data", path, *columns, *SMALL)
        done(train(method, *options, f"--output-dir={method}"))
        assert len(losses(method)) == 2


@pytest.mark.slow
def test_a_streamed_file_trains_as_one_in_memory(
    train: Train, tmp_path: Path, tiny_model_folder: Path
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(lines_of(PAIRS))
    (tmp_path / "held-out.jsonl").write_bytes(lines_of(PAIRS[:2]))
    options = ("--model", tiny_model_folder, "--train-data", tmp_path / "rows.jsonl", *SMALL)
    options += ("--eval-data", tmp_path / "held-out.jsonl", "--set=shuffle=false")
    printed = done(train("dpo", *options, "--output-dir=whole"))
    done(train("dpo", *options, "--set=streaming=true", "--output-dir=streamed"))
    assert losses("whole") == losses("streamed")
    assert "2 of 12 training rows have a prompt that is also in" in printed


@pytest.mark.parametrize("method", by_default(["reward", "dpo", "simpo", "kto", "sft"], "reward", "dpo"))
def test_transcripts_as_they_are(train: Train, tiny_model_folder: Path, method: str) -> None:
    if not HH.exists():
        pytest.skip("needs ../shared/data")
    options = ("--model", tiny_model_folder, "--train-data", HH, "--subset-size=12", *SMALL)
    printed = done(train(method, *options, "--set=max_length=400", "--output-dir=run"))
    assert len(losses("run")) == 2 and str(HH) in printed


@pytest.mark.slow
def test_transcripts_with_empty_completions(train: Train, tiny_model_folder: Path) -> None:
    if not HH.exists():
        pytest.skip("needs ../shared/data")
    options = ("dpo", "--model", tiny_model_folder, "--train-data", HH, "--set=eval_fraction=0")
    refused = train(*options, "--output-dir=run")
    assert refused.exit_code == 2
    assert "line 335, field chosen: empty completion" in refused.stderr and not Path("run").exists()
    printed = re.sub(r"[\s│]+", " ", done(train(*options, "--dry-run", "--on-bad-row=skip")))
    assert "line 335" in printed and "line 1013" in printed and "2 bad ones left out" in printed
    assert len(load_records(HH, "preference", on_bad_row="skip").records) == 1498


BAD = {
    "missing.jsonl": (GOOD + b'{"prompt": "p", "chosen": "a"}\n', ["line 2, field rejected: missing"]),
    "type.jsonl": (
        GOOD + b'{"prompt": "p", "chosen": 3, "rejected": "b"}\n',
        ["line 2, field chosen", "got 3"],
    ),
    "empty.jsonl": (GOOD + b'{"prompt": "p", "chosen": "", "rejected": "b"}\n', ["line 2, field chosen"]),
    "same.jsonl": (
        GOOD + b'{"prompt": "p", "chosen": "b", "rejected": "b"}\n',
        ["line 2, field rejected", "same"],
    ),
    "latin.jsonl": (GOOD + b'{"prompt": "\xff", "chosen": "b", "rejected": "c"}\n', ["line 2", "UTF-8"]),
    "cut.jsonl.gz": (gzip.compress(GOOD * 500)[:-20], ["cut.jsonl.gz", "cut off after line"]),
    "long.jsonl": (
        GOOD + b'{"prompt": "' + b"x" * (11 << 20) + b'", "chosen": "b", "rejected": "c"}\n',
        ["line 2", "longer than 10 MB"],
    ),
    "broken.jsonl": (GOOD + b'{"prompt":\n', ["line 2", "invalid JSON"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_refused_by_place_or_skipped(
    train_refused: Refused, train: Train, tmp_path: Path, tiny_model_folder: Path, name: str
) -> None:
    data, parts = BAD[name]
    path = tmp_path / name
    path.write_bytes(data)
    options = ("dpo", "--model", tiny_model_folder, "--train-data", path, *SMALL)
    message = train_refused(*options, "--output-dir=run")
    assert str(path) in message and all(part in message for part in parts), message
    printed = done(train(*options, "--on-bad-row=skip", "--set=eval_fraction=0", "--dry-run"))
    assert "1 bad ones left out" in re.sub(r"[\s│]+", " ", printed)


@pytest.mark.parametrize(
    ("name", "data", "parts"),
    [
        ("nothing.jsonl", b"", ["holds no rows"]),
        ("rows.txt", b"rows", ["unknown type '.txt'", ".jsonl"]),
        ("rows.parquet", b"rows", ["not valid Parquet"]),
        ("none.jsonl", None, ["does not exist"]),
        ("one.jsonl", GOOD, ["all its prompts are held out", "eval_fraction"]),
    ],
)
def test_files(
    train_refused: Refused, tmp_path: Path, name: str, data: bytes | None, parts: list[str]
) -> None:
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    message = train_refused("dpo", "--train-data", path, "--set=eval_fraction=0.9999")
    assert name in message and all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("method", "options", "parts"),
    [
        ("dpo", ["--set=bta=1"], ["unknown key bta", "beta"]),
        ("dpo", ["--set=beta=-1"], ["beta is -1", "> 0"]),
        ("dpo", ["--set=beta"], ["'beta'", "key=value"]),
        ("dpo", ["--set=loss_type=ipo", "--set=label_smoothing=0.1"], ["label_smoothing", "ipo"]),
        ("dpo", ["--set=lora_r=4"], ["--set lora_r=4", "no adapter is trained", "use_peft=true"]),
        ("dpo", ["--set=report_to=mlflow"], ["report_to", "mlflow", "tensorboard"]),
        ("dpo", ["--set=bf16=true", "--set=fp16=true"], ["bf16 and fp16"]),
        ("dpo", ["--set=deepspeed=a.json", "--set=fsdp=true"], ["deepspeed and fsdp"]),
        ("dpo", ["--set=deepspeed=none.json"], ["none.json", "zero_optimization"]),
        ("dpo", ["--set=fsdp=true"], ["fsdp", "torchrun"]),
        ("dpo", ["--set=load_in_4bit=true"], ["use_peft"]),
        ("dpo", ["--set=load_in_4bit=true", "--set=use_peft=true"], ["--model"]),
        ("dpo", ["--model=a", "--set=model_config=b.yaml"], ["model_name_or_path", "model_config"]),
        ("dpo", ["--set=model_config=b.yaml"], ["b.yaml", "does not exist"]),
        ("dpo", ["--eval-data=rows.jsonl"], ["--train-data"]),
        ("dpo", ["--set=streaming=true"], ["--train-data"]),
        ("dpo", ["--model=./nowhere"], ["./nowhere", "does not exist"]),
        ("dpo", ["--config=none.yaml"], ["none.yaml", "does not exist"]),
        ("dpo", ["--resume=nowhere"], ["nowhere", "does not exist"]),
        ("dpo", ["--resume"], ["no unfinished run"]),
        ("dpo", ["--resume=a", "--backend=trl"], ["--backend", "--resume"]),
        ("dpo", ["--set=backend=jax"], ["backend", "'rlhf'", "'trl'"]),
        ("prm", ["--set=aggregate=max"], ["aggregate", "'min'"]),
        ("reward", ["--set=ensemble=forest"], ["ensemble", "'heads'"]),
        ("reward", ["--set=ensemble=heads"], ["ensemble is heads with num_members 1"]),
        ("kto", ["--set=columns={label: good}"], ["columns", "--train-data"]),
    ],
)
def test_settings(train_refused: Refused, method: str, options: list[str], parts: list[str]) -> None:
    message = train_refused(method, *options)
    assert all(part in message for part in parts), message


def test_an_end_token_that_is_not_in_the_vocabulary(train_refused: Refused, tiny_model_folder: Path) -> None:
    for options in (["--model", tiny_model_folder], ["--dry-run"]):
        message = train_refused("dpo", "--set=eos_token=zzz", *options)
        assert "'zzz'" in message and "vocabulary" in message, message


def test_what_evaluation_does_not_give_cannot_pick_the_best(
    train_refused: Refused, tiny_model_folder: Path
) -> None:
    few = ("--subset-size=8", "--set=story_eval_rows=4")
    options = ("--model", tiny_model_folder, *few, "--set=metric_for_best_model=acc")
    message = train_refused("sft", *options, "--output-dir=run")
    assert "eval_acc" in message and "eval_loss" in message


@pytest.mark.slow
def test_a_run_stands_for_its_model_and_a_reward_model_is_no_language_model(
    train: Train, train_refused: Refused, tmp_path: Path, tiny_model_folder: Path
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(lines_of(PAIRS))
    rows = ("--train-data", tmp_path / "rows.jsonl", *SMALL, "--max-steps=1")
    done(train("reward", "--model", tiny_model_folder, *rows, "--output-dir=rm"))
    done(train("dpo", "--model", tiny_model_folder, *rows, "--set=use_peft=true", "--output-dir=lora"))
    done(train("dpo", "--model=lora", *rows, "--output-dir=again"))
    assert read_json("again/config.json")["model_name_or_path"].endswith("lora/final")
    prompts = ("--train-data", tmp_path / "rows.jsonl", "--set=max_completion_length=4")
    done(train("grpo", "--model=again", "--reward=rm", *prompts, "--dry-run"))
    for dry in ([], ["--dry-run"]):
        message = train_refused("dpo", "--model=rm", *rows, *dry)
        assert "rm/final is a reward model" in message, message
    (tmp_path / "rows.jsonl").write_text("not read before the model is refused")
    assert "rm/final is a reward model" in train_refused("dpo", "--model=rm", *rows)


@pytest.mark.parametrize("command", ["dpo", "grpo", "minmax", "rlhf"])
def test_a_dry_run_refuses_damaged_weights_as_the_run_does(
    train_refused: Refused, tiny_model_folder: Path, command: str
) -> None:
    weights = tiny_model_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    planned, run = (train_refused(command, "--model", tiny_model_folder, *dry) for dry in (["--dry-run"], []))
    assert planned == run and str(tiny_model_folder) in run


def test_folders_in_use_and_runs_of_others_are_left_alone(train: Train, tiny_model_folder: Path) -> None:
    few = ("--subset-size=8", "--set=story_eval_rows=4")
    done(train("sft", "--model", tiny_model_folder, *few, *SMALL, "--output-dir=run"))
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    for arguments, part in (
        (["sft", "--output-dir=run"], "not empty"),
        (["sft", "--resume=run"], "holds a finished run"),
        (["dpo", "--resume=run"], "is of a run of sft"),
        (["sft", "--resume=run", "--set=seed=3"], "--set cannot be combined with --resume"),
        (["sft", "--resume=run", "--eval-only", "--max-steps=9"], "--eval-only"),
        (["dpo", "--config=run/config.json"], "is of a run of sft"),
    ):
        result = train(*arguments)
        assert result.exit_code == 2 and part in result.stderr, result.output
    assert before == {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}


@pytest.mark.parametrize("streaming", by_default(["false", "true"], "true"))
def test_rows_that_the_chat_template_refuses_are_counted(
    train: Train, tmp_path: Path, tiny_model_folder: Path, byte_tokenizer: Any, streaming: str
) -> None:
    def messages(role: str) -> dict[str, Any]:
        return {"messages": [{"role": role, "content": "hi"}, {"role": "assistant", "content": "hello"}]}

    model = tmp_path / "model"
    shutil.copytree(tiny_model_folder, model)
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'pirate' %}{{ raise_exception('no pirates') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    tokenizer.save_pretrained(model)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines_of([*[messages("user")] * 8, messages("pirate")]) + b"no row\n")
    options = (
        "--train-data",
        path,
        "--on-bad-row=skip",
        "--set=eval_fraction=0",
        f"--set=streaming={streaming}",
    )
    printed = done(train("sft", "--model", model, *options, *SMALL, "--output-dir=run"))
    assert "no pirates" in printed and "line 10" in printed
    data = read_json("run/results.json")["data"]
    # Those of a stream are met in training, and so counted as rows too.
    assert (data["train_rows"], data["bad_rows"]) == (8 if streaming == "false" else 10, 2)


def test_held_out_rows_that_do_not_fit_are_named_as_such(
    train_refused: Refused, tmp_path: Path, tiny_model_folder: Path
) -> None:
    rows, long = tmp_path / "rows.jsonl", tmp_path / "long.jsonl"
    rows.write_bytes(lines_of(PAIRS))
    long.write_bytes(lines_of([{**PAIRS[0], "chosen": " very" * 90}]))
    options = ("--train-data", rows, "--eval-data", long, "--set=max_length=64")
    message = train_refused("reward", "--model", tiny_model_folder, *options)
    assert message.startswith("held-out rows: no row is left, 1 were left out")


def test_a_dry_run_knows_the_context_of_the_tiny_model(train: Train, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines_of(PAIRS))
    assert "limit 4,096" in done(train("sft", "--dry-run", "--train-data", path, "--set=max_length=4096"))


SHAPE = """
architecture: llama
hidden_size: 1024
intermediate_size: 4096
num_layers: 16
num_attention_heads: 16
vocab_size: 32000
"""


def test_a_dry_run_plans_for_gpus_that_are_not_here(
    train: Train, train_refused: Refused, tmp_path: Path
) -> None:
    """368 million parameters: DPO keeps 20 bytes of each, above 7 GB; sharded over 8 processes it fits."""
    (tmp_path / "shape.yaml").write_text(SHAPE)
    (tmp_path / "rows.jsonl").write_bytes(lines_of(PAIRS))
    job = [
        "dpo",
        "--dry-run",
        "--model-config",
        tmp_path / "shape.yaml",
        "--train-data",
        tmp_path / "rows.jsonl",
    ]
    alone = train_refused(*job, "--gpu", "6GB")
    assert "16 of them" not in alone and "--set use_peft=true" in alone
    assert "--set fsdp=true" in train_refused(*job, "--gpu", "6GB", "--processes", "8")
    printed = done(train(*job, "--gpu", "6GB", "--processes", "8", "--set=fsdp=true"))
    assert "each of 8 processes" in printed and "gathered layers" in printed
    assert "keys and values" not in printed and "checkpoint" in printed


def test_a_machine_is_planned_for_by_dry_runs_only(train_refused: Refused) -> None:
    assert "--dry-run" in train_refused("sft", "--gpu", "H100")
    assert "--dry-run" in train_refused("sft", "--processes", "2")
