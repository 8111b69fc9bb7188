"""`rlhf-train compare`: arms, budgets, refusals, and a comparison that is interrupted and goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from raises import raises_error
from rlhf_algos import METHODS
from rlhf_data import UserError, alone_in, apply_overrides
from rlhf_train.commands import compare
from rlhf_train.comparison.budget import measured_steps, spent_per_step, steps_of
from rlhf_train.comparison.plan import ComparisonPlan, parse_budget, parse_seeds
from rlhf_train.display.console import make_console

PAIRS = [
    {"prompt": f"Where is the {animal}?", "chosen": f" In the {place}.", "rejected": " I do not know."}
    for animal in ("cat", "dog", "hen", "fox", "owl", "pig")
    for place in ("barn", "hall", "shed", "yard")
]


@pytest.fixture
def given(tmp_path: Path, model: Path, rows_file: Callable[..., Path]) -> dict[str, Any]:
    """Options of a comparison that could be run."""
    held_out = [{"prompt": f"Where is the {animal}?"} for animal in ("elk", "ram", "cow")]
    return {
        "methods": ("dpo", "grpo"),
        "model": str(model),
        "train_data": str(rows_file(PAIRS)),
        "eval_data": str(rows_file(held_out, "held.jsonl")),
        "reward": ("length:target=4",),
        "budget": "steps=4",
        "overrides": (),
        "sweep": (),
        "seeds": None,
        "preference_data": None,
        **dict.fromkeys(("held_out_reward", "evaluations", "max_prompts", "max_new_tokens", "temperature")),
    }


def arguments(given: dict[str, Any], *more: str) -> list[str]:
    """The same as a command line."""
    found = [*given["methods"]]
    for name in ("model", "train_data", "eval_data", "budget"):
        found += [f"--{name.replace('_', '-')}", given[name]]
    return [*found, *(part for line in given["reward"] for part in ("--reward", line)), *more]


def test_budgets_and_seeds_are_read() -> None:
    assert parse_budget("tokens=2e5") == ("tokens", 200_000)
    assert parse_seeds("3,1") == (3, 1)
    for wrong in ("tokens", "tokens=0", "hours=3", "steps=x", "steps=inf", "steps=2.5"):
        with raises_error("invalid_option"):
            parse_budget(wrong)
    for wrong in ("", "1,1", "-1", "a"):
        with raises_error("invalid_option"):
            parse_seeds(wrong)


def test_steps_make_up_the_budget() -> None:
    # The first step warms up: the median of the other seconds, 2, 4 and 3, is 3; of tokens, whose
    # differences are 10, 20, 30 and 20, it is 20; 30 samples a second for those seconds are 60, 120, 90: 90.
    seconds, tokens = (9.0, 2.0, 4.0, 3.0), (10, 30, 60, 80)
    rows = [
        {"step_time": s, "num_tokens": t, "samples_per_second": 30.0}
        for s, t in zip(seconds, tokens, strict=True)
    ]
    assert spent_per_step(rows, "seconds") == 3
    assert spent_per_step(rows, "tokens") == 20
    assert spent_per_step(rows, "samples") == 90
    assert spent_per_step([], "steps") == 1
    assert [steps_of(budget, 20) for budget in (20, 29, 31, 100)] == [1, 1, 2, 5]
    with raises_error("budget_too_small"):
        steps_of(19, 20)
    with raises_error("missing_metric"):
        spent_per_step([{"step_time": 1.0}], "tokens")
    assert [measured_steps(*each) for each in ((10, 4), (8, 2), (2, 4))] == [[3, 6, 9, 10], [4, 8], [1, 2]]


def test_arms_are_methods_and_values_of_sweeps(given: dict[str, Any]) -> None:
    settings = ("learning_rate=1e-4", "grpo.num_generations=4")
    plan = ComparisonPlan.of_options(given | {"overrides": settings, "sweep": ("dpo.beta=0.1,0.3",)})
    assert [(arm.name, arm.overrides) for arm in plan.arms] == [
        ("dpo-beta=0.1", ("learning_rate=1e-4", "beta=0.1")),
        ("dpo-beta=0.3", ("learning_rate=1e-4", "beta=0.3")),
        ("grpo", ("learning_rate=1e-4", "num_generations=4")),
    ]
    places = [folder.as_posix() for _, _, folder in plan.folders(Path("out"))]
    assert places[:3] == [f"out/{arm.name}/seed-0" for arm in plan.arms] and len(places) == 9
    assert "--reward" in plan.arguments(plan.arms[2]) and "--reward" not in plan.arguments(plan.arms[0])
    again = ComparisonPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan


def test_offline_methods_can_have_rows_of_their_own(
    given: dict[str, Any], rows_file: Callable[..., Path]
) -> None:
    own = str(rows_file(PAIRS, "pairs.jsonl"))
    plan = ComparisonPlan.of_options(given | {"preference_data": own})
    assert [own in plan.arguments(arm) for arm in plan.arms] == [True, False]


def test_a_file_of_distributed_is_for_every_method_as_far_as_it_goes(
    given: dict[str, Any], tmp_path: Path
) -> None:
    """DPO samples nothing, so workers that sample are GRPO's alone; `--set` changes what the file says."""
    file = tmp_path / "distributed.json"
    more = {"distributed": str(file), "overrides": ("distributed.address=local",)}

    def found(**section: int) -> list[Any]:
        file.write_text(json.dumps(section))
        plan = ComparisonPlan.of_options(given | more)
        values = [apply_overrides({}, arm.overrides) for arm in plan.arms]
        return [METHODS[arm.method].resolve(each) for arm, each in zip(plan.arms, values, strict=True)]

    dpo, grpo = (config.distributed for config in found(trainer_workers=2, rollout_workers=3))
    assert (dpo.trainer_workers, dpo.address) == (grpo.trainer_workers, grpo.address) == (2, "local")
    assert grpo.rollout_workers == 3
    more["overrides"] = ()
    dpo, grpo = (config.distributed for config in found(rollout_workers=3))
    assert dpo is None and grpo.rollout_workers == 3
    with raises_error("unknown_key"):
        found(trainer_worker=2)
    more["methods"] = ("dpo",)
    with raises_error("nothing_distributed"):
        found(rollout_workers=3)


def test_torchrun_is_refused(
    given: dict[str, Any], train_refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "distributed.trainer_workers=2" in train_refused("compare", *arguments(given))


def test_a_dry_run_needs_no_cluster(given: dict[str, Any], train: Callable[..., Result]) -> None:
    away = "distributed={trainer_workers: 2, address: '127.0.0.1:9'}"
    assert train("compare", *arguments(given, "--dry-run", "--set", away)).exit_code == 0


def test_a_run_that_was_killed_before_it_began_is_started_again(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training processes come up for a while, and what they leave would be refused as a folder in use."""
    plan, folder = ComparisonPlan.of_options(given), tmp_path / "run"
    (folder / ".trainers" / "state").mkdir(parents=True)
    started = []
    monkeypatch.setattr(compare, "_train", started.append)
    compare._run_arm(plan, plan.arms[0], 0, folder, 4, make_console())
    assert not folder.exists() and "--resume" not in started[0]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"methods": ("dpo",)}, "too_few_rows"),
        ({"methods": ("dpo", "dpo")}, "repeated_name"),
        ({"methods": ("dpo", "reward")}, "unknown_method"),
        ({"methods": ("dpo", "nothing")}, "unknown_method"),
        ({"overrides": ("seed=3",)}, "conflicting_options"),
        ({"overrides": ("grpo.max_steps=3",)}, "conflicting_options"),
        ({"sweep": ("kto.beta=0.1,0.2",)}, "invalid_option"),
        ({"sweep": ("dpo.beta=0.1,0.1",)}, "invalid_option"),
        ({"sweep": ("dpo.beta=0.1,0.10",)}, "invalid_option"),
        ({"budget": "steps=1e30"}, "invalid_option"),
        ({"sweep": ("beta=0.1,0.2",)}, "invalid_option"),
        ({"sweep": ("dpo.beta=0.1,0.2",), "overrides": ("dpo.beta=0.3",)}, "conflicting_options"),
    ],
    ids=str,
)
def test_what_is_no_comparison_is_refused(given: dict[str, Any], change: dict[str, Any], code: str) -> None:
    with raises_error(code):
        ComparisonPlan.of_options(given | change)


def test_mistakes_are_found_before_anything_is_trained(
    given: dict[str, Any], train_refused: Callable[..., str], tmp_path: Path, rows_file: Callable[..., Path]
) -> None:
    out = ("--output-dir", str(tmp_path / "out"))
    for more in (
        ("--set", "grpo.num_generation=4"),  # a key that is not there, of the second method
        ("--set", "dpo.beta=-1"),
        ("--set", "grpo.num_generations=3"),  # steps of 8 completions
        ("--set", "dpo.eval_data=/nowhere.jsonl"),
        ("--max-new-tokens", "100000"),  # longer than the context
        ("--held-out-reward", "nothing"),
        ("--held-out-reward", "number"),  # the prompts have no answers
        ("--preference-data", str(rows_file([{"prompt": "a"}], "no_pairs.jsonl"))),
    ):
        train_refused("compare", *arguments(given, *more, *out))
    for name in ("model", "eval_data", "budget"):
        kept = [*given["methods"]]
        for other in {"model", "train_data", "eval_data", "budget"} - {name}:
            kept += [f"--{other.replace('_', '-')}", given[other]]
        assert name.replace("_", "-") in train_refused("compare", *kept, "--reward", given["reward"][0], *out)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_leaves_nothing(
    given: dict[str, Any], train: Callable[..., Result], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = train("compare", *arguments(given, "--seeds", "0,5", "--dry-run", "--output-dir", str(out)))
    assert "4 runs" in result.output and not out.exists()


def test_held_out_prompts_that_are_trained_on_are_counted(
    given: dict[str, Any], train: Callable[..., Result], rows_file: Callable[..., Path]
) -> None:
    held_out = [{"prompt": row["prompt"]} for row in PAIRS[::4]] + [{"prompt": "Where is the elk?"}]
    given |= {"eval_data": str(rows_file(held_out, "shared.jsonl")), "methods": ("dpo", "sft")}
    settings = ("--set", "eval_fraction=0", "--dry-run")
    assert "warning: 6 of these 7 prompts" in train("compare", *arguments(given, *settings)).output


@pytest.mark.slow
def test_a_run_that_fails_does_not_stop_the_others(
    given: dict[str, Any], train: Callable[..., Result], tmp_path: Path
) -> None:
    reward, out = tmp_path / "reward.py", tmp_path / "out"
    reward.write_text(
        "def f(prompts, completions):\n"
        "    assert len(set(prompts)) == len(prompts)  # not so in a group of GRPO's\n"
        "    return [len(each) for each in completions]\n"
    )
    given |= {"reward": (f"{reward}:f",), "budget": "steps=1", "methods": ("grpo", "dpo")}
    more = ("--seeds", "3", "--evaluations", "1", "--max-new-tokens", "8", "--output-dir", str(out))
    result = train("compare", *arguments(given, *more, "--set", "grpo.max_completion_length=8"))
    assert result.exit_code == 2
    assert "grpo, seed 3" in result.stderr and f"--resume {out}" in result.stderr
    assert (out / "dpo" / "seed-3" / "policy.jsonl").exists() and not (out / "results.json").exists()


@pytest.mark.slow
@pytest.mark.proof
def test_a_comparison_goes_on_where_it_was_stopped(given: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    more = ("--seeds", "3", "--evaluations", "2", "--max-new-tokens", "8", "--sweep", "dpo.beta=0.1")
    settings = ("--set", "grpo.max_completion_length=8")
    given = given | {"budget": "tokens=1000"}
    command = [sys.executable, "-m", "rlhf_train", "compare"]
    process = subprocess.Popen(
        [*command, *arguments(given, *more, *settings, "--output-dir", str(out))],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    first = out / "dpo-beta=0.1" / "seed-3" / "metrics.jsonl"
    while not first.exists():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate()
    assert process.returncode == 143 and f"--resume {out}" in stderr
    assert not (out / "results.json").exists()

    subprocess.run([*command, "--resume", str(out)], cwd=tmp_path, check=True, capture_output=True)
    found = json.loads((out / "comparison" / "comparison.json").read_text())
    assert found["metric"] == "eval_policy/reward" and found["kl"] == "eval_policy/kl"
    assert {group["name"] for group in found["groups"]} == {"dpo-beta=0.1", "grpo"}
    assert len(found["runs"]) == 2
    steps = json.loads((out / "steps.json").read_text())
    for folder in out.glob("*/seed-*"):
        rows = [json.loads(line) for line in (folder / "policy.jsonl").read_text().splitlines()]
        last = steps[folder.parent.name]
        assert [row["step"] for row in rows] == [0, *measured_steps(last, 2)]
        assert rows[0]["eval_policy/kl"] == 0 and rows[-1]["eval_policy/kl"] > -1e-5
        assert {each.name for each in folder.glob("checkpoint-*")} == {f"checkpoint-{last}"}
    again = subprocess.run([*command, "--resume", str(out)], cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0 and "step 1/" not in again.stdout  # nothing is trained twice


@pytest.mark.slow
def test_a_training_ends_with_its_comparison(given: dict[str, Any], tmp_path: Path) -> None:
    """Also that of a resumed one, and where the comparison's process is killed."""
    out, run = tmp_path / "out", tmp_path / "out/dpo/seed-3"
    command = [sys.executable, "-m", "rlhf_train", "compare"]
    given = given | {"budget": "steps=20000"}
    started = [*command, *arguments(given, "--seeds", "3", "--evaluations", "1", "--output-dir", str(out))]

    def lines() -> int:
        metrics = run / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    for words, number in (
        (started, signal.SIGTERM),
        ([*command, "--resume", str(out)], signal.SIGTERM),
        ([*command, "--resume", str(out)], signal.SIGKILL),
    ):
        before = lines()
        process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while lines() <= before:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait() == (143 if number == signal.SIGTERM else -number)
        while True:  # its training holds the folder until it has ended
            with contextlib.suppress(UserError), alone_in(run):
                break
            time.sleep(0.2)
        ended = lines()
        time.sleep(1.0)
        assert ended == lines() < 20000


@pytest.mark.usefixtures("ray_installed")
@pytest.mark.slow
@pytest.mark.proof
def test_every_run_is_trained_by_processes_on_a_cluster(given: dict[str, Any], tmp_path: Path) -> None:
    """Its bytes are those of one process, of as many rows a step, but for the last bits."""
    file = tmp_path / "distributed.json"
    file.write_text(json.dumps({"trainer_workers": 2, "address": "local", "object_store_gb": 0.2}))
    given = given | {"budget": "steps=2"}
    more = ["--seeds", "3", "--evaluations", "1", "--max-new-tokens", "8", "--set", "learning_rate=1e-3"]
    more += ["--set", "grpo.max_completion_length=8", "--set", "grpo.num_generations=4"]
    found: dict[str, Any] = {}
    for name, rows, where in (("ray", 4, ["--distributed", str(file)]), ("one", 8, [])):
        out = tmp_path / name
        words = arguments(given, *more, "--set", f"per_device_train_batch_size={rows}", *where)
        command = [sys.executable, "-m", "rlhf_train", "compare", *words, "--output-dir", str(out)]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert done.stdout.count("starting 2 training processes on Ray") == (2 if where else 0)
        found[name] = {
            arm: [
                json.loads(line) for line in (out / arm / "seed-3" / "policy.jsonl").read_text().splitlines()
            ]
            for arm in given["methods"]
        }
        assert {
            group["name"]
            for group in json.loads((out / "comparison" / "comparison.json").read_text())["groups"]
        } == {*given["methods"]}
    for arm, rows in found["ray"].items():
        for row, other in zip(rows, found["one"][arm], strict=True):
            assert row == pytest.approx(other, abs=1e-4)
