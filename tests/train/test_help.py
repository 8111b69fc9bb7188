"""The help is complete, and cheap: it loads nothing that trains."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

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
    "arguments", [["--help"], ["minmax", "--help"], ["dpo", "--help"], ["--version"], []]
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from rlhf_train.cli import main\n"
        f"main({arguments!r}, standalone_mode=False) if {arguments!r} else None\n"
        "print(sorted({'torch', 'transformers', 'pydantic', 'rich', 'yaml', 'numpy'} & set(sys.modules)))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("method", "seed"), [("sft", 42), ("prm", 42), ("minmax", 0)])
def test_help_gives_the_true_default_seed(method: str, seed: int) -> None:
    from rlhf_algos import METHODS
    from rlhf_minmax import MinMaxConfig
    from rlhf_train.cli import main

    text = " ".join(CliRunner().invoke(main, [method, "--help"]).stdout.split())
    config = METHODS[method].resolve({}) if method in METHODS else MinMaxConfig()
    assert config.seed == seed and f"the built models too. [default: {seed}]" in text


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
