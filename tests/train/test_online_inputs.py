"""Prompts of every form for `rlhf-train grpo|ppo`, and every mistake: used, or refused in one sentence."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from files import done, read_json, read_lines, write_lines

Train = Callable[..., Result]
Refused = Callable[..., str]
FEW = (
    *("--set=story_rows=8", "--set=story_eval_rows=4", "--set=per_device_train_batch_size=8"),
    *("--set=num_generations=4", "--set=max_completion_length=8", "--max-steps=1"),
)
THINGS = ("ball", "book", "key", "cat", "hat", "cup", "pen", "map", "box", "bag", "fan", "jug")
ROWS = [{"prompt": f"where is the {thing} ?", "answer": thing} for thing in THINGS]
FAULTS = """
import json

value = 3


def raises(completions, **columns):
    raise RuntimeError("out of order")


def raises_for_one(prompts, completions, **columns):
    return [1 / (prompt != prompts[0]) for prompt in prompts]


def too_few(completions, **columns):
    return [1.0]


def not_a_number(completions, **columns):
    return [float("nan")] * len(completions)


def text(completions, **columns):
    return ["good"] * len(completions)


def says_nothing(completions, **columns):
    return [None] * len(completions)


def needs_a_column(completions, difficulty):
    return [1.0] * len(completions)


def fails_later(completions, trainer_state, **columns):
    return json.loads("{") if trainer_state.global_step else [float(len(text)) for text in completions]
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of reward functions that do wrong; `faults:name` names one."""
    path = tmp_path / "faults.py"
    path.write_text(FAULTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    return path


def sampled(run: str) -> list[dict[str, Any]]:
    return read_lines(Path(run, "samples.jsonl"))


def test_columns_reach_the_reward_under_their_names(
    train: Train, rows: Path, tiny_model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "work" / "seen.py").write_text(
        "import json\n\n\ndef seen(prompts, completions, answer, **columns):\n"
        "    with open('seen.jsonl', 'a') as file:\n"
        "        for row in zip(prompts, completions, answer):\n"
        "            print(json.dumps(row), file=file)\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    renamed = write_lines(
        tmp_path / "renamed.jsonl", [{"ask": r["prompt"], "gold": r["answer"]} for r in ROWS]
    )
    options = (f"--model={tiny_model_folder}", *FEW, "--reward=seen.py:seen", "--set=eval_fraction=0")
    done(train("grpo", *options, f"--train-data={rows}", "--set=sample_steps=1", "--output-dir=run"))
    seen = read_lines("seen.jsonl")
    assert {(prompt, answer) for prompt, _, answer in seen} <= {tuple(row.values()) for row in ROWS}
    ends = min(len(ROWS), 8)  # completions of the end; before them those of the start and the pre-flight
    of_the_step = seen[-8 - ends : -ends]  # two prompts with four completions each
    assert of_the_step[0][0] == of_the_step[3][0] != of_the_step[4][0] == of_the_step[7][0]
    of_steps = [row for row in sampled("run") if "stage" not in row]
    for row, (prompt, completion, _) in zip(of_steps, of_the_step, strict=False):
        assert (row["prompt"], row["completion"], row["reward"]) == (prompt, completion, len(completion))
    mapped = ("--set=columns.prompt=ask", "--reward=exact:column=gold", f"--train-data={renamed}")
    done(train("ppo", f"--model={tiny_model_folder}", *FEW, *mapped, "--output-dir=mapped"))
    assert read_json("mapped/results.json")["data"]["source"] == str(renamed)


def test_conversations_are_answered_with_messages(
    train: Train, tiny_model_folder: Path, tmp_path: Path
) -> None:
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    (tiny_model_folder / "chat_template.jinja").write_text(template)
    talks = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    path = write_lines(tmp_path / "talks.jsonl", talks)
    (tmp_path / "work" / "talks.py").write_text(
        "def answered(prompts, completions, **columns):\n"
        "    assert all(prompt[-1]['role'] == 'user' for prompt in prompts)\n"
        "    assert all([m['role'] for m in messages] == ['assistant'] for messages in completions)\n"
        "    return [float(len(messages[0]['content'])) for messages in completions]\n"
    )
    options = (f"--model={tiny_model_folder}", *FEW, f"--train-data={path}", "--set=sample_steps=1")
    done(train("grpo", *options, "--reward=talks.py:answered", "--reward=exact", "--output-dir=run"))
    rows = sampled("run")
    assert all(row["prompt"].startswith("user: where is the ") for row in rows)
    assert all(row["prompt"].endswith(" ?\nassistant: ") for row in rows)
    assert all(row["reward"] >= len(row["completion"]) for row in rows)


def test_streamed_rows_and_rows_left_out(train: Train, tiny_model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, {"answer": "no prompt"}]))
    held_out = write_lines(tmp_path / "held-out.jsonl", ROWS[:2])
    options = (f"--model={tiny_model_folder}", *FEW, f"--train-data={path}", "--on-bad-row=skip")
    options += (f"--eval-data={held_out}", "--reward=length:target=4")
    printed = done(train("grpo", *options, "--output-dir=whole"))
    assert "line 13, field prompt" in printed and "2 of 12 training rows have a prompt" in printed
    done(train("grpo", *options, "--set=streaming=true", "--output-dir=streamed"))
    first, second = (json.loads(Path(run, "results.json").read_text()) for run in ("whole", "streamed"))
    assert first["data"]["bad_rows"] == second["data"]["bad_rows"] == 1
    assert second["data"]["dropped_rows"] == 0 and first["before"] == second["before"]  # held-out rows alike


def test_prompts_too_long_are_left_out_and_counted(
    train: Train, tiny_model_folder: Path, tmp_path: Path
) -> None:
    long = write_lines(tmp_path / "long.jsonl", [*ROWS, {"prompt": "where " * 600, "answer": "here"}])
    options = (f"--model={tiny_model_folder}", *FEW, f"--train-data={long}", "--reward=exact")
    printed = done(train("grpo", *options, "--set=eval_fraction=0", "--dry-run"))
    flat = " ".join(printed.replace("│", " ").split())
    assert "left out: 1 training rows" in flat and "12 rows for training" in flat


@pytest.mark.parametrize(
    ("method", "options", "parts"),
    [
        ("grpo", ["--reward=numbr"], ["'numbr' is unknown", "did you mean number?", "pkg.mod:function"]),
        ("grpo", ["--reward=faults:no_such"], ["faults has no no_such"]),
        ("grpo", ["--reward=faults:value"], ["faults:value is a", "expected a function"]),
        ("grpo", ["--reward=no_such_module.x:f"], ["no_such_module", "cannot be imported"]),
        ("grpo", ["--reward=faults.py"], ["name the function in it"]),
        ("grpo", ["--reward=./nowhere/model"], ["model folder ./nowhere/model does not exist"]),
        ("grpo", ["--reward={model}"], ["is a language model", "has no score"]),
        ("grpo", ["--reward={model}", "--dry-run"], ["is a language model", "has no score"]),
        ("grpo", ["--reward=length"], ["length", "target"]),
        ("grpo", ["--reward=length:targt=4"], ["no option 'targt'", "did you mean target?"]),
        ("grpo", ["--reward=length:target=four"], ["target is 'four'"]),
        ("grpo", ["--reward=http://"], ["'http://'", "expected http://HOST"]),
        ("ppo", ["--reward=faults:raises"], ["reward function raises", "RuntimeError: out of order"]),
        pytest.param(
            "ppo",
            ["--reward=faults:raises_for_one"],
            ["raises_for_one, sample 0", "ZeroDivisionError"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "grpo",
            ["--reward=faults:too_few"],
            ["too_few returned 1 rewards for", "completions"],
            marks=pytest.mark.slow,
        ),
        ("grpo", ["--reward=faults:not_a_number"], ["not_a_number, sample 0", "nan"]),
        pytest.param("grpo", ["--reward=faults:text"], ["text, sample 0", "'good'"], marks=pytest.mark.slow),
        ("grpo", ["--reward=faults:says_nothing"], ["no reward function is applicable"]),
        ("grpo", ["--reward=faults:needs_a_column"], ["takes difficulty, which is not a column"]),
        ("grpo", ["--reward=number"], ["number", "answer", "not one number"]),
        pytest.param("grpo", ["--reward=exact:column=gold"], ["needs a column gold"], marks=pytest.mark.slow),
        ("grpo", ["--set=task=arithmetic", "--reward=choice"], ["no column choices"]),
        ("grpo", ["--reward=length:target=4", "--set=reward_weights=[1,2]"], ["2 numbers for 1 rewards"]),
        ("grpo", ["--reward=length:target=4", "--set=reward_weights=[.inf]"], ["reward_weights", "inf"]),
        ("grpo", ["--reward="], ["''", "expected a rule"]),
        ("grpo", ["--set=task=sums"], ["task is 'sums'", "'arithmetic'"]),
        ("grpo", ["--set=num_generations=3"], ["8 completions", "not a multiple of num_generations 3"]),
        ("ppo", ["--set=num_generations=3", "--dry-run"], ["8 completions", "num_generations 3"]),
        ("grpo", ["--set=num_generations=1"], ["num_generations is 1"]),
        ("grpo", ["--set=max_completion_length=512"], ["max_completion_length 512", "no room for a prompt"]),
        ("ppo", ["--set=max_completion_length=600", "--dry-run"], ["max_completion_length 600", "lower it"]),
        ("grpo", ["--set=min_completion_length=9"], ["min_completion_length 9 is above"]),
        ("grpo", ["--set=max_prompt_length=2"], ["no row is left", "the limit is 2"]),
        ("grpo", ["--set=overlong_buffer=9"], ["overlong_buffer 9 is above"]),
        ("grpo", ["--set=backend=trl"], ["backend trl is for the offline methods"]),
        ("grpo", ["--set=temperature=0"], ["temperature is 0"]),
        ("grpo", ["--set=kl_coef=0.1"], ["unknown key kl_coef"]),
        ("ppo", ["--set=beta=0.1"], ["unknown key beta"]),
        ("grpo", ["--set=sapo_temperature_pos=2"], ["--set sapo_temperature_pos=2", "loss_type dapo"]),
        ("grpo", ["--set=loss_type=ppo"], ["loss_type is 'ppo'", "'dapo'"]),
        ("grpo", ["--set=epsilon=null", "--set=epsilon_high=0.3"], ["epsilon_high is set without epsilon"]),
        pytest.param(
            "grpo",
            ["--set=metric_for_best_model=acc"],
            ["eval_acc", "choose from eval_reward"],
            marks=pytest.mark.slow,
        ),
        ("grpo", ["--set=stop=['']"], ["--set stop=['']"]),
        ("grpo", ["--set=reward_weights=[true]"], ["reward_weights: true"]),
        ("grpo", ["--set=num_generations=1000000000000000000"], ["<= 65536"]),
        ("grpo", ["--set=capability_suites=[]"], ["--set capability_suites=[]"]),
        ("grpo", ["--set=use_peft=true", "--set=lora_target_modules=[]"], ["--set lora_target_modules=[]"]),
        ("ppo", ["--set=kl_penalty=loss"], ["k1 has no gradient in the loss"]),
        ("ppo", ["--set=kl_target=1", "--set=kl_coef=0"], ["kl_target adapts kl_coef"]),
        ("ppo", ["--set=value_model_path=./none"], ["model folder ./none does not exist"]),
        ("ppo", ["--set=value_model_path=./a", "--set=value_model=shared"], ["value_model_path"]),
        ("ppo", ["--set=value_model=none"], ["value_model is 'none'", "'shared'"]),
        ("grpo", ["--set=vllm_server_base_url=http://x"], ["needs use_vllm=true"]),
        ("grpo", ["--resume=nowhere"], ["run folder nowhere does not exist"]),
        ("grpo", ["--resume=a", "--reward=number"], ["--reward", "--resume"]),
    ],
)
def test_mistakes_are_refused_and_leave_nothing(
    train_refused: Refused,
    tiny_model_folder: Path,
    faults: Path,
    method: str,
    options: list[str],
    parts: list[str],
) -> None:
    given = [option.format(model=tiny_model_folder) for option in options]
    base = () if any("--resume" in option for option in given) else (f"--model={tiny_model_folder}", *FEW)
    message = train_refused(method, *base, *given)
    assert all(part in message for part in parts), message


def test_a_url_where_nobody_answers(train_refused: Refused, tiny_model_folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/score"
        reward = f"--reward=remote:url={url},retries=1,backoff_s=0"
        message = train_refused("grpo", f"--model={tiny_model_folder}", *FEW, reward)
    assert f"{url} gave no rewards in 2 tries" in message and "check that the scorer runs" in message


@pytest.mark.parametrize(
    ("lines", "options", "parts"),
    [
        ([{"answer": "here"}], [], ["rows.jsonl, line 1, field prompt: missing"]),
        ([{"prompt": ""}], [], ["rows.jsonl, line 1, field prompt: empty"]),
        ([{"prompt": 3}], [], ["rows.jsonl, line 1, field prompt", "got 3"]),
        ([{"prompt": [{"role": "user"}]}], [], ["rows.jsonl, line 1, field prompt"]),
        ([{"prompt": [{"role": "user", "content": "hi"}], "answer": "a"}], [], ["chat template"]),
        ([{"prompt": "where ?"}], ["--set=eval_fraction=0"], ["needs a column answer"]),
        ([], [], ["holds no rows"]),
        (ROWS, ["--set=columns.prompt=ask"], ["line 1, field ask", "missing"]),
    ],
)
def test_bad_rows(
    train_refused: Refused,
    tmp_path: Path,
    tiny_model_folder: Path,
    lines: list[dict[str, Any]],
    options: list[str],
    parts: list[str],
) -> None:
    path = write_lines(tmp_path / "rows.jsonl", lines)
    given = (f"--model={tiny_model_folder}", *FEW, f"--train-data={path}", "--reward=exact")
    message = train_refused("grpo", *given, *options)
    assert all(part in message for part in parts), message


def test_rows_without_a_reward_and_options_of_other_methods(
    train: Train, train_refused: Refused, rows: Path, tiny_model_folder: Path
) -> None:
    message = train_refused("grpo", f"--model={tiny_model_folder}", *FEW, f"--train-data={rows}")
    assert "there is no reward; give one with --reward" in message
    for method, option in (("grpo", "--backend=rlhf"), ("sft", "--reward=number"), ("ppo", "--stage=ppo")):
        result = train(method, option)
        assert result.exit_code == 2 and "No such option" in result.stderr, result.output
    assert list(Path().iterdir()) == []


def test_a_reward_that_fails_after_the_first_step_keeps_what_was_done(
    train: Train, faults: Path, tiny_model_folder: Path
) -> None:
    options = (f"--model={tiny_model_folder}", *FEW, "--max-steps=3", "--set=save_steps=1")
    result = train("ppo", *options, "--reward=faults:fails_later", "--output-dir=run")
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    mistake, advice = result.stderr.splitlines()
    assert "JSONDecodeError" in mistake and advice == "continue with: rlhf-train ppo --resume run"
    assert {"checkpoint-1", "config.json", "metrics.jsonl"} <= {path.name for path in Path("run").iterdir()}
    assert not Path("run/results.json").exists()
