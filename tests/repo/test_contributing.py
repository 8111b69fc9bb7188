"""The worked examples of new training methods run as they stand, from Python and from the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from proofs import by_default

PAGE = Path(__file__).parents[2] / "docs" / "methods" / "own.md"
SMALL = ("--set=story_rows=16", "--set=story_eval_rows=8", "--max-steps=2", "--set=learning_rate=3e-3")


def examples() -> list[str]:
    """The code of the offline methods, the second one of pairs, and of the online one."""
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)


@pytest.fixture(autouse=True)
def only_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods and commands that a test adds are gone after it; no curves are drawn."""
    from rlhf_algos import METHODS
    from rlhf_train import plugins
    from rlhf_train.cli import main

    for name in ("rank", "slic", "reinforce"):
        monkeypatch.setitem(METHODS, name, METHODS["dpo"])
        monkeypatch.delitem(METHODS, name)
    monkeypatch.setattr("rlhf_eval.training_curves", lambda *args, **options: None)
    monkeypatch.setattr(plugins, "_FILES", {})
    monkeypatch.setattr(main, "commands", dict(main.commands))


def test_the_new_method_of_the_example_trains(tmp_path: Path, tiny_model_folder: Path) -> None:
    from rlhf_algos import METHODS, TrainingJob
    from rlhf_data import RunFolder

    offline, *_ = examples()
    file = tmp_path / "example.py"
    file.write_text(offline)  # where pydantic reads what the settings' docstrings say
    exec(compile(offline, str(file), "exec"), {"__name__": "example"})
    chosen = {
        "story_rows": 32,
        "subset_size": 16,
        "story_eval_rows": 8,
        "max_steps": 8,
        "learning_rate": 3e-3,
        "margin": 2.0,
    }
    settings = METHODS["rank"].resolve({"model_name_or_path": str(tiny_model_folder), **chosen})
    results = TrainingJob("rank", settings, RunFolder.create(tmp_path / "run", job="rank")).train()
    assert results["after"]["eval_loss"] < results["before"]["eval_loss"]
    assert set(results["after"]) == {"eval_loss", "eval_accuracy", "eval_ref_kl"}
    assert json.loads((tmp_path / "run" / "config.json").read_text())["margin"] == 2.0


@pytest.mark.parametrize("behind", by_default([True, False], True))
def test_a_method_of_a_file_is_a_command(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    from rlhf_train.cli import main

    monkeypatch.chdir(tmp_path)
    for name, code in zip(("rank", "slic", "reinforce"), examples(), strict=True):
        Path(f"{name}.py").write_text(code)
    settings = {
        "rank": ("--set=margin=2", "--set=per_device_train_batch_size=4", "--subset-size=8"),
        "slic": ("--set=weight=0.5", "--set=per_device_train_batch_size=4", "--subset-size=8"),
        "reinforce": (
            *("--reward=length:target=4", "--set=num_generations=2", "--set=max_completion_length=4"),
            *("--set=per_device_train_batch_size=8", "--subset-size=8"),
        ),
    }
    for name, own in settings.items():
        module = (f"--method-module={name}.py",) if behind else ("--method-module", f"{name}.py")
        given = (f"--model={tiny_model_folder}", *own, *SMALL, f"--output-dir=run-{name}")
        arguments = (name, *module, *given) if behind else (*module, name, *given)
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 0, (done.output, done.exception)
        assert (Path(f"run-{name}") / "final" / "model.safetensors").is_file()
    listed = CliRunner().invoke(main, ["--method-module", "rank.py", "settings", "rank", "--json"])
    assert {"margin", "learning_rate"} <= {row["key"] for row in json.loads(listed.stdout)}


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        (None, ["does not exist"]),
        ("x = 1\n", ["METHODS"]),
        ("x = 1\nraise KeyError('oops')\n", ["line 2", "KeyError", "oops"]),
        ("def f(:\n", ["SyntaxError"]),
        ("x = 1\nexit(3)\n", ["line 2", "SystemExit"]),
    ],
)
def test_a_file_that_adds_no_method_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str | None, parts: list[str]
) -> None:
    from rlhf_train.cli import main

    monkeypatch.chdir(tmp_path)
    if code is not None:
        Path("mine.py").write_text(code)
    done = CliRunner().invoke(main, ["dpo", "--method-module", "mine.py"])
    assert done.exit_code == 2
    assert all(part in done.stderr for part in ("mine.py", *parts)), done.stderr


def test_a_method_of_an_installed_package_is_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlhf_train.cli import main

    info = tmp_path / "ranker-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ranker\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlhf.methods]\nrank = ranker:METHOD\nbad = ranker:OTHER\n")
    (tmp_path / "ranker.py").write_text(examples()[0] + '\nMETHOD = METHODS.pop("rank")\nOTHER = 3\n')
    monkeypatch.syspath_prepend(tmp_path)
    helped = CliRunner().invoke(main, ["--help"])
    assert "ranker:METHOD" in helped.stdout
    planned = CliRunner().invoke(main, ["rank", "--dry-run", "--set=margin=3", "--set=story_rows=8"])
    assert planned.exit_code == 0, (planned.output, planned.exception)
    bad = CliRunner().invoke(main, ["bad", "--dry-run"])
    assert bad.exit_code == 2 and "ranker:OTHER" in bad.stderr
