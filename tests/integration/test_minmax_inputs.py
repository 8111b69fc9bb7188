"""`rlhf-train minmax` on rows, models and options of every kind, each run for real, small."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from files import CLOCK
from rlhf_data import load_qa, split_of
from rlhf_minmax.game.stories import load_stories

ROOT = Path(__file__).parents[2]
STORIES = ROOT / "tests" / "fixtures" / "stories.jsonl"
SMALL_DEMO = (
    *("demo.pretrain_steps=2", "demo.sft_steps=2", "demo.reward_steps=2", "demo.judge_steps=2"),
    *("demo.batch_size=4", "demo.flawed_reward=false", "demo.num_stories=8"),
    *("data.probe_stories=4", "data.eval_stories=4", "force=true"),
)
SMALL = (
    *(*SMALL_DEMO, "training.batch_size=3"),
    *("training.monitor_warmup_steps=1", "training.monitor_updates_per_policy=2"),
    *("game.num_generations=2", "game.num_critiques=2", "policy_model.max_new_tokens=6"),
    "monitor_model.max_new_tokens=8",
)
Run = Callable[..., Path]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of the models built on the spot, shared by all runs of this file."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command with small settings, by default two steps on the hand-written stories; its folder."""
    from rlhf_train.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    for name in ("training_curves", "minmax_figure"):  # drawing is most of so small a run
        monkeypatch.setattr(f"rlhf_minmax.run.minmax_job.{name}", lambda *args: None)

    def call(folder: str, *options: Any, steps: int | None = 2, small: bool = True) -> Path:
        arguments = [f"--set={setting}" for setting in (SMALL if small else SMALL_DEMO)]
        arguments += ["--train-data", str(STORIES)] if small else []
        arguments += ["--max-steps", str(steps)] if steps else []
        result = CliRunner().invoke(main, ["minmax", *arguments, *map(str, options), "--output-dir", folder])
        assert result.exit_code == 0, (result.output, result.exception)
        return tmp_path / folder

    return call


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Saves a random model of an architecture with a byte-level tokenizer, once; its folder."""
    from rlhf_models import tiny_model, train_byte_tokenizer

    root = tmp_path_factory.mktemp("models")
    tokenizer = train_byte_tokenizer([record.story for record in load_qa(STORIES)], 400)

    def save(architecture: str) -> Path:
        folder = root / architecture
        if not folder.exists():
            context = {"n_positions": 400} if architecture == "gpt2" else {"max_position_embeddings": 400}
            model = tiny_model(architecture, vocab_size=len(tokenizer), seed=5, **context)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return folder

    return save


def results_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics of every step, wall-clock ones aside."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(CLOCK)} for line in lines]


def held_out() -> Any:
    return next(record for record in load_qa(STORIES) if split_of(record.story) == "eval")


def check_prompts(folder: Path) -> None:
    """Both players' prompts hold the first held-out story letter by letter, in results and report."""
    record, choices = held_out(), " | ".join(held_out().choices)
    prompts = {prompt["role"]: prompt["text"] for prompt in results_of(folder)["prompts"]}
    start = f"{record.story}\n{record.question}\n{choices}\nanswer:"
    assert prompts["policy"] == start
    assert prompts["monitor"].startswith(start) and prompts["monitor"].endswith("\ncritique:")
    report = (folder / "report.html").read_text(encoding="utf-8")
    assert escape(record.story, quote=False) in report or escape(record.story) in report
    assert "unk" not in prompts["policy"] and "\ufffd" not in prompts["policy"]


def test_the_stories_are_varied() -> None:
    records = load_qa(STORIES)
    assert len(records) >= 24 and {len(record.choices) for record in records} >= {2, 3, 4}
    assert any(not record.story.isascii() and split_of(record.story) == "eval" for record in records)
    assert not held_out().story.isascii()


@pytest.mark.slow
def test_rows_alone(run: Run) -> None:
    folder = run("run")
    results = results_of(folder)
    assert results["steps"] == 2
    for block in ("before", "plain", "after"):
        assert results[block]["policy/hack_rate"] is None
        assert isinstance(results[block]["policy/accuracy"], float)
    assert all(line["policy/hack_rate"] is None for line in metrics_of(folder))
    check_prompts(folder)
    again = run("again", "--no-baseline")
    assert results_of(again)["plain"] is None and not (again / "plain").exists()
    assert results_of(again)["before"] == results["before"]
    assert metrics_of(again) == metrics_of(folder)  # the baseline leaves the game as it is


@pytest.mark.slow
def test_the_sum_world(run: Run) -> None:
    folder = run("run", *(f"--set={setting}" for setting in (*SMALL, "data.world=sums")), small=False)
    results = results_of(folder)
    assert results["steps"] == 2
    for block in ("before", "plain", "after"):
        assert isinstance(results[block]["policy/hack_rate"], float)
    prompt = results["prompts"][0]["text"]
    assert re.search(r"\nhow many \w+ \?\nanswer:$", prompt)
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert all(sample["gold"] in sample["choices"] and sample["gold"].isdigit() for sample in samples)
    assert "how many" in (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "architecture",
    [pytest.param("gpt2", marks=pytest.mark.slow), pytest.param("qwen2", marks=pytest.mark.slow)],
)
def test_a_model_of_the_users_own(run: Run, model_folder: Callable[[str], Path], architecture: str) -> None:
    model = model_folder(architecture)
    folder = run("run", "--model", model, "--no-baseline")
    assert results_of(folder)["models"]["policy"] == results_of(folder)["models"]["monitor"] == str(model)
    check_prompts(folder)
    for role in ("policy", "monitor"):
        assert (folder / "final" / role / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_two_models_a_prompted_judge_and_full_training(run: Run, model_folder: Callable[[str], Path]) -> None:
    policy, monitor = model_folder("gpt2"), model_folder("qwen2")
    judge = ("--set=judge_model.kind=prompted", "--judge-model", policy)
    full = ("--set=policy_model.use_lora=false", "--set=monitor_model.use_lora=false")
    names = (f"--set=policy_model.model_name={policy}", f"--set=monitor_model.model_name={monitor}")
    folder = run("run", *names, *judge, *full)
    assert results_of(folder)["models"] | {"reward": None} == {
        **{"policy": str(policy), "monitor": str(monitor), "reward": None, "judge": str(policy)}
    }
    check_prompts(folder)
    types = [
        json.loads((folder / "final" / role / "config.json").read_text())["model_type"]
        for role in ("policy", "monitor")
    ]
    assert types == ["gpt2", "qwen2"]
    mixed = run("mixed", *names, full[0], "--set=judge_model.kind=rule", "--no-baseline")
    assert (mixed / "final" / "policy" / "model.safetensors").exists()
    assert (mixed / "final" / "monitor" / "adapter_model.safetensors").exists()
    assert results_of(mixed)["models"]["judge"] == "rule"


@pytest.mark.slow
def test_reward_and_judge_folders(run: Run, model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    from rlhf_models import JudgeModel, RewardModel, load_causal_lm, load_tokenizer

    base = model_folder("gpt2")
    for name, kind in (("reward", RewardModel), ("judge", JudgeModel)):
        kind.from_backbone(load_causal_lm(base), load_tokenizer(base), seed=1).save_pretrained(
            tmp_path / name
        )
    own = ("--model", base, "--reward-model", tmp_path / "reward", "--judge-model", tmp_path / "judge")
    folder = run("run", *own, "--no-baseline")
    models = results_of(folder)["models"]
    assert models["reward"] == str(tmp_path / "reward") and models["judge"] == str(tmp_path / "judge")


@pytest.mark.slow
def test_seeds(run: Run) -> None:
    one, same, other = (
        run(name, "--no-baseline", "--seed", seed) for name, seed in (("one", 7), ("same", 7), ("other", 8))
    )
    assert metrics_of(one) == metrics_of(same)
    assert results_of(one)["after"] == results_of(same)["after"]
    assert metrics_of(one) != metrics_of(other)
    assert results_of(one)["before"] != results_of(other)["before"]


@pytest.mark.slow
def test_epochs(run: Run) -> None:
    stories = len([record for record in load_qa(STORIES) if split_of(record.story) == "train"])
    folder = run("run", "--epochs", 0.5, "--no-baseline", "--set=training.batch_size=4", steps=None)
    per_epoch = -(-stories // 4)
    assert results_of(folder)["steps"] == -(-per_epoch // 2) == len(metrics_of(folder))


@pytest.mark.slow
def test_evaluation_alone(run: Run, tmp_path: Path) -> None:
    from rlhf_train.cli import main

    trained = run("trained", "--no-baseline")
    start = run("start", "--no-baseline", "--eval-only")
    evaluation = json.loads((start / "evaluation.json").read_text())
    assert evaluation["before"] == results_of(trained)["before"] and evaluation["after"] is None
    assert not (start / "results.json").exists() and not (start / "metrics.jsonl").exists()
    result = CliRunner().invoke(main, ["minmax", "--eval-only", "--resume", str(trained)])
    assert result.exit_code == 0, (result.output, result.exception)
    evaluation = json.loads((trained / "evaluation.json").read_text())
    assert evaluation["checkpoint"] == "checkpoint-2"
    assert evaluation["after"] == results_of(trained)["after"]


@pytest.mark.slow
def test_resume_alone_finds_the_newest_unfinished_run(run: Run, tmp_path: Path) -> None:
    from rlhf_train.cli import main

    for name in ("minmax-20250101-000000", "minmax-20250102-000000"):
        folder = run(f"outputs/{name}", "--no-baseline", "--set=training.save_steps=1")
    expected = metrics_of(folder)
    for path in (folder / "results.json", folder / "report.html", folder / "checkpoint-2"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    result = CliRunner().invoke(main, ["minmax", "--resume"])
    assert result.exit_code == 0, (result.output, result.exception)
    assert "resumed from step 1" in result.stdout
    assert results_of(folder)["resumed"] and metrics_of(folder) == expected


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_other_file_types_hold_the_same_rows(tmp_path: Path, suffix: str) -> None:
    from rlhf_minmax import MinMaxConfig

    rows = [json.loads(line) for line in STORIES.read_text(encoding="utf-8").splitlines()]
    path = tmp_path / f"stories.{suffix}"
    if suffix == "csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(row | {"choices": "|".join(row["choices"])} for row in rows)
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist([row | {"answer": str(row["answer"])} for row in rows]), path)
    assert load_qa(path) == load_qa(STORIES)
    config = MinMaxConfig.from_dict({"data": {"train_data": str(path)}})
    same = MinMaxConfig.from_dict({"data": {"train_data": str(STORIES)}})
    found, expected = load_stories(config), load_stories(same)
    assert (found.train, found.held_out) == (expected.train, expected.held_out)


def test_a_dry_run_leaves_nothing(run: Run, tmp_path: Path) -> None:
    folder = run("run", "--dry-run")
    assert not folder.exists() and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_example_config_in_8_bits(run: Run, gpt2_hub_cache: Path) -> None:
    """The file as it stands, `gpt2` from the hub's cache; only the stories are made few and short."""
    few = ("--set=data.train_stories=8", "--set=data.story_world.max_sentences=3")
    folder = run("run", "--config", ROOT / "configs" / "minmax_config.json", *few, steps=1, small=False)
    config = json.loads((folder / "config.json").read_text())
    given = json.loads((ROOT / "configs" / "minmax_config.json").read_text())
    assert config["policy_model"] | given["policy_model"] == config["policy_model"]
    assert config["monitor_model"] | given["monitor_model"] == config["monitor_model"]
    assert config["training"] | given["training"] | {"max_steps": 1} == config["training"]
    results = results_of(folder)
    assert results["models"]["policy"] == results["models"]["monitor"] == "gpt2"
    assert results["steps"] == 1 and isinstance(results["after"]["policy/hack_rate"], float)


@pytest.mark.parametrize("name", ["minmax_config.json", "minmax_story.yaml"])
def test_the_configs_are_what_they_say(name: str) -> None:
    from rlhf_data import load_config_file
    from rlhf_minmax import MinMaxConfig

    values = load_config_file(ROOT / "configs" / name)
    config = MinMaxConfig.from_dict(values, where=name)
    if name == "minmax_story.yaml":
        assert config == MinMaxConfig() and keys_of(values) == keys_of(MinMaxConfig().to_dict())
    else:
        training = {"policy_learning_rate": 1e-5, "monitor_learning_rate": 3e-4, "batch_size": 2}
        training |= {"monitor_updates_per_policy": 5, "constraint_penalty_lambda": 0.1, "num_epochs": 8}
        player = {"model_name": "gpt2", "lora_r": 16, "max_new_tokens": 25}
        assert values == {
            "policy_model": player | {"load_in_8bit": True, "temperature": 0.7},
            "monitor_model": player | {"use_lora": True, "temperature": 0.8},
            "training": training,
        }


def keys_of(values: dict[str, Any], prefix: str = "") -> set[str]:
    inner = (keys_of(v, f"{prefix}{k}.") for k, v in values.items() if isinstance(v, dict))
    return {f"{prefix}{key}" for key in values}.union(*inner)


@pytest.mark.slow
def test_the_instruct_config_plays_a_chat_model(run: Run, model_folder: Callable[[str], Path]) -> None:
    from rlhf_models import RewardModel, load_causal_lm, load_tokenizer

    plain = model_folder("llama")
    chat, reward = plain.with_name("chat"), plain.with_name("chat-reward")
    shutil.copytree(plain, chat)
    tokenizer = load_tokenizer(chat)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer.save_pretrained(chat)
    RewardModel.from_backbone(load_causal_lm(plain), tokenizer, seed=0).save_pretrained(reward)
    models = ("--model", chat, "--reward-model", reward, "--judge-model", plain)
    folder = run("run", "--config", ROOT / "configs" / "minmax_instruct.yaml", *models, steps=2)
    prompts = {prompt["role"]: prompt["text"] for prompt in results_of(folder)["prompts"]}
    start = f"<user>{held_out().story}\n{held_out().question}\n"
    assert prompts["policy"].startswith(start) and prompts["monitor"].startswith(start)
    assert prompts["policy"].endswith("Answer with one of the choices and nothing else.<assistant>")
    assert prompts["monitor"].endswith("Mary went to the shed. so wrong<assistant>")
