"""What a person sees of a training without a terminal, and what is answered before torch is loaded."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rlhf_algos.tracking.step_report import StepReport
from rlhf_train.display.training import TrainingDisplay


def shown(*reports: StepReport) -> list[str]:
    file = io.StringIO()
    display = TrainingDisplay(("loss",), Console(file=file, width=200, highlight=False))
    for report in reports:
        display.on_report(report)
    return file.getvalue().splitlines()


def test_a_logged_step_says_how_it_goes_and_how_long_it_takes() -> None:
    metrics = {"loss": 0.69314, "learning_rate": 2e-5, "grad_norm": 1.5, "num_tokens": 100.0}
    (line,) = shown(StepReport(40, 400, metrics, True, 60.0, 3661.4, 8120.2))
    clock, rest = line.split("  ", 1)
    assert len(clock.split(":")) == 3
    assert rest == (
        "step 40/400  loss 0.6931  learning_rate 2e-05  grad_norm 1.5  8,120 tokens/s  1:01:01 left"
    )


def test_other_steps_are_silent_unless_something_happens(tmp_path: Path) -> None:
    quiet = StepReport(3, 9, {"loss": 1.0}, False)
    assert shown(quiet) == []
    evaluated = StepReport(6, 9, {"loss": 1.0, "eval_loss": 0.5, "eval_rewards/margins": 0.25}, True)
    lines = shown(evaluated, StepReport(8, 9, {"loss": 1.0}, False, checkpoint=tmp_path / "checkpoint-8"))
    assert [line.split("  ", 1)[1] for line in lines] == [
        "step 6/9  loss 1  0:00:00 left",
        "step 6/9  evaluation: loss 0.5  rewards/margins 0.25",
        "step 8/9  wrote checkpoint-8",
    ]


MISSING = [
    (("dpo", "--model=../nowhere"), "../nowhere"),
    (("sft", "--model=nobody/has-this-model"), "nobody/has-this-model"),
    (("grpo", "--reward=./nowhere"), "./nowhere"),
    (("dpo", "--train-data=nowhere.jsonl"), "nowhere.jsonl"),
    (("dpo", "--set=deepspeed=zero.json"), "zero.json"),
    (("minmax", "--reward-model=./nowhere"), "./nowhere"),
    (("minmax", "--train-data=nowhere.jsonl"), "nowhere.jsonl"),
    (("rlhf", "--model=./nowhere", "--data=."), "./nowhere"),
]
CALLS = """
import json, sys
from click.testing import CliRunner
from rlhf_train.cli import main
for arguments in json.loads(sys.argv[1]):
    done = CliRunner().invoke(main, arguments)
    loaded = [name for name in ("torch", "rlhf_minmax.game.forward_pass") if name in sys.modules]
    print(json.dumps([done.exit_code, done.stdout, done.stderr, loaded]))
"""


def test_what_is_not_there_is_said_before_torch_is_loaded(tmp_path: Path) -> None:
    calls = json.dumps([arguments for arguments, _ in MISSING])
    done = subprocess.run(
        [sys.executable, "-c", CALLS, calls],
        cwd=tmp_path,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for (arguments, named), (code, stdout, stderr, loaded) in zip(MISSING, answers, strict=True):
        assert code == 2 and loaded == [], (arguments, stderr)
        assert named in stderr and stderr.startswith("Error: ")
        assert stdout.startswith(f"rlhf-train {arguments[0]}: ")
    assert not list(tmp_path.glob("outputs"))


def test_training_does_not_load_the_game(tmp_path: Path) -> None:
    program = (
        "import sys, rlhf_train.display.training, rlhf_train.commands.training; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_dry_run_shows_what_the_model_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model_folder: Path
) -> None:
    from click.testing import CliRunner

    from rlhf_train.cli import main

    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text(
        '{"prompt": "where is mary ?\\n", "chosen": "garden", "rejected": "kitchen"}\n' * 2
    )
    arguments = (
        "--model",
        str(tiny_model_folder),
        "--train-data",
        "pairs.jsonl",
        "--set=eval_fraction=0",
        "--dry-run",
    )
    shown = CliRunner().invoke(main, ["dpo", *arguments, "--output-dir", "mine"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, (shown.output, shown.exception)
    for part in (r"where is mary ?\n |=> garden", "|=> kitchen", "1e-06, linear", "output folder", "mine"):
        assert part in shown.stdout, part
    turns = [("user", "Q"), ("assistant", "one"), ("user", "R"), ("assistant", "two")]
    messages = [{"role": role, "content": content} for role, content in turns]
    Path("chat.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    only = ("--model", str(tiny_model_folder), "--train-data", "chat.jsonl", "--set=eval_fraction=0")
    only += ("--set=assistant_only_loss=true", "--dry-run")
    template = "--set=chat_template_path=template.jinja"
    Path("template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    learned = CliRunner().invoke(main, ["sft", *only, template], env={"COLUMNS": "200"})
    assert "Q |=> one <=| R |=> two" in learned.stdout, learned.output
    online = CliRunner().invoke(
        main, ["grpo", *arguments, "--reward=length:target=4"], env={"COLUMNS": "200"}
    )
    assert r"where is mary ?\n" in online.stdout and "length:target=4" in online.stdout
