"""The help is complete, and cheap: it loads nothing that trains."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from imports import imported_by
from rlhf_algos import METHODS

OPTIONS = (
    *("--config", "--set", "--model", "--reward-model", "--judge-model", "--train-data", "--eval-data"),
    *("--output-dir", "--resume", "--max-steps", "--epochs", "--seed", "--eval-only", "--dry-run"),
    *("--no-baseline", "--rebuild-demo"),
)


def test_help_names_every_option(cli: Callable[..., Result]) -> None:
    result = cli("--help")
    assert result.exit_code == 0
    assert [option for option in OPTIONS if f"{option} " not in result.stdout] == []
    assert "[DIR]" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["minmax", "--help"], ["dpo", "--help"], ["pipeline", "--help"], ["--version"], []],
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    call = f"main({arguments!r}, standalone_mode=False)" if arguments else ""
    code = f"from rlhf_train.cli import main; {call}"
    assert imported_by(code) == []


@pytest.mark.parametrize(("method", "seed"), [("sft", 42), ("prm", 42), ("minmax", 0)])
def test_help_gives_the_true_default_seed(method: str, seed: int) -> None:
    from rlhf_minmax import MinMaxConfig
    from rlhf_train.cli import main

    text = " ".join(CliRunner().invoke(main, [method, "--help"]).stdout.split())
    config = METHODS[method].resolve({}) if method in METHODS else MinMaxConfig()
    assert config.seed == seed and f"including built models. [default: {seed}]" in text


@pytest.mark.slow
def test_the_startup_benchmark_measures_every_help() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "startup.py"
    command = [sys.executable, script, "--repeats", "2"]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert set(result["commands"]) == {f"rlhf-train {name}--help" for name in ("", "minmax ", "dpo ")}
    for measured in result["commands"].values():
        assert len(measured["seconds"]) == 2
        assert min(measured["seconds"]) <= measured["median_seconds"] <= max(measured["seconds"])


def test_a_wrong_setting_is_answered_without_loading_torch(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from rlhf_train.cli import main\n"
        "try:\n"
        "    main(['minmax', '--set', 'sed=1'])\n"
        "except SystemExit as end:\n"
        "    print(end.code, 'torch' in sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert run.stdout == "2 False\n"


@pytest.mark.parametrize("method", [*METHODS, "minmax", "rlhf"])
def test_every_setting_is_listed_with_its_default(method: str) -> None:
    from rlhf_train.cli import main

    done = CliRunner().invoke(main, ["settings", method, "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    rows = {row["key"]: row for row in json.loads(done.stdout)}
    assert all(row["meaning"] and row["allowed"] for row in rows.values())
    if method in METHODS:
        fields = METHODS[method].job_config.model_fields
        assert {key.partition(".")[0] for key in rows} == {
            field.alias or name for name, field in fields.items()
        }
        assert rows["learning_rate"]["default"] == fields["learning_rate"].default
        assert rows["learning_rate"]["allowed"] == "number > 0"
        assert rows["learning_rate"]["tiny"] == METHODS[method].tiny["learning_rate"]
    help_text = CliRunner().invoke(main, [method, "--help"]).stdout
    assert help_text.strip().endswith(f"rlhf-train settings {method}")


def test_settings_as_a_table_and_of_nothing() -> None:
    from rlhf_train.cli import main

    table = CliRunner().invoke(main, ["settings", "dpo"]).stdout
    assert "learning_rate" in table and "for the tiny model" in table
    none = CliRunner().invoke(main, ["settings", "dpp"])
    assert none.exit_code == 2 and "dpo" in none.stderr


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("lr", "learning_rate"),
        ("dataset_name", "train_data"),
        ("batch_size", "per_device_train_batch_size"),
        ("epochs", "num_train_epochs"),
        ("max_seq_length", "max_length"),
        ("torch_dtype", "dtype"),
        ("bta", "beta"),
    ],
)
def test_names_of_other_libraries_are_understood(given: str, meant: str) -> None:
    from rlhf_train.cli import main

    refused = CliRunner().invoke(main, ["dpo", "--set", f"{given}=1"])
    assert refused.exit_code == 2
    assert f"unknown key {given}; did you mean {meant}" in refused.stderr


def test_an_unknown_key_names_a_few_and_where_all_are() -> None:
    from rlhf_train.cli import main

    refused = CliRunner().invoke(main, ["dpo", "--set", "zzzzzz=1"])
    assert refused.exit_code == 2 and "rlhf-train settings dpo" in refused.stderr
    assert len(refused.stderr) < 300
