"""`rlhf-train rlhf`: three stages in one folder, some of them, the embedded stories, and every mistake."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from files import done, metrics_of, read_json
from proofs import by_default
from rlhf_algos import METHODS
from rlhf_data.worlds.story_tasks import story_records

Train = Callable[..., Result]
Refused = Callable[..., str]
STAGES = ("sft", "reward", "ppo")
SMALL = (
    *("--set=sft.per_device_train_batch_size=4", "--set=reward.per_device_train_batch_size=4"),
    *("--set=ppo.per_device_train_batch_size=4", "--set=ppo.max_completion_length=8", "--max-steps=2"),
)


def small(*stages: str) -> list[str]:
    """What `SMALL` has for these stages; settings of stages that do not run are refused."""
    others = tuple(f"--set={stage}." for stage in {"sft", "reward", "ppo"} - set(stages))
    return [option for option in SMALL if not option.startswith(others)]


FILES = {"sft": "sft.jsonl", "reward": "preference.jsonl", "ppo": "prompts.jsonl"}
DEMO = {
    **{"pretrain_steps": 10, "sft_steps": 10, "reward_steps": 4, "judge_steps": 4},
    **{"num_stories": 20, "batch_size": 16, "flawed_reward": False},
    **{"min_verdict_accuracy": 0, "min_judge_accuracy": 0},
}


def write_rows(folder: Path, n: int = 24) -> Path:
    """Story records of each stage, in a folder as `--data` takes it."""
    folder.mkdir(exist_ok=True)
    for stage, file in FILES.items():
        kind: Any = {"reward": "preference", "ppo": "prompts"}.get(stage, stage)
        rows = [dataclasses.asdict(record) for record in story_records(kind, n, split="train", seed=1)]
        rows = [{**row, **row.pop("columns", {})} for row in rows]
        lines = [
            json.dumps({k: v for k, v in row.items() if v not in (None, "", False)}) + "\n" for row in rows
        ]
        (folder / file).write_text("".join(lines))
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "data")


@dataclasses.dataclass(frozen=True)
class Whole:
    """A run of all stages, and what it was given."""

    run: Path
    printed: str
    options: tuple[str, ...]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, built_llama_folder: Path) -> Whole:
    """All three stages on a small random model."""
    from rlhf_train.cli import main

    folder = tmp_path_factory.mktemp("rlhf")
    data = write_rows(folder / "data")
    options = (f"--model={built_llama_folder}", f"--data={data}", *SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhf_eval.training_curves", lambda *args, **options: None)
        printed = done(CliRunner().invoke(main, ["rlhf", *options, f"--output-dir={folder / 'run'}"]))
    return Whole(folder / "run", printed, options)


def test_all_stages_leave_their_folders_and_one_summary(whole: Whole) -> None:
    run = whole.run
    assert {path.name for path in run.iterdir()} == {"config.json", "results.json", *STAGES}
    for stage in STAGES:
        names = {path.name for path in (run / stage).iterdir()}
        assert names >= {"config.json", "metrics.jsonl", "results.json", "final", "checkpoint-2"}
        assert f"stage {stage}" in whole.printed and f"Held-out rows, stage {stage}" in whole.printed
    results = read_json(run / "results.json")
    assert results["method"] == "rlhf" and list(results["stages"]) == list(STAGES)
    assert (
        results["after"] == results["stages"]["ppo"]["after"] == read_json(run / "ppo/results.json")["after"]
    )
    assert set(results["wall_time"]) == {*STAGES, "total"}
    assert f"the trained model: {run}/ppo/final" in whole.printed.replace("\n", "")


def test_each_stage_starts_from_what_the_one_before_it_left(whole: Whole) -> None:
    from safetensors.torch import load_file

    configs = {stage: read_json(whole.run / stage / "config.json") for stage in STAGES}
    tuned, rewarder = str(whole.run / "sft" / "final"), str(whole.run / "reward" / "final")
    assert configs["reward"]["model_name_or_path"] == configs["ppo"]["model_name_or_path"] == tuned
    assert configs["ppo"]["reward"] == [rewarder]
    assert {Path(config["train_data"]).name for config in configs.values()} == set(FILES.values())
    start, end = (load_file(whole.run / stage / "final" / "model.safetensors") for stage in ("sft", "ppo"))
    assert any(not bool((start[name] == end[name]).all()) for name in start)


@pytest.mark.slow
def test_the_run_s_own_config_is_a_config_file(train: Train, whole: Whole) -> None:
    config = read_json(whole.run / "config.json")
    assert config["method"] == "rlhf" and config["stages"] == list(STAGES)
    done(train("rlhf", f"--config={whole.run / 'config.json'}", "--output-dir=again"))
    assert read_json("again/results.json")["after"] == read_json(whole.run / "results.json")["after"]
    for command, other in (("ppo", whole.run), ("rlhf", whole.run / "ppo")):
        refused = train(command, f"--config={other / 'config.json'}")
        assert refused.exit_code == 2 and "is of a run of" in refused.stderr, refused.output


def test_a_finished_run_is_not_run_again(train: Train, whole: Whole) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.run.rglob("*.safetensors")}
    printed = done(train("rlhf", "--resume", whole.run))
    assert all(f"stage {stage} is finished" in printed for stage in STAGES)
    assert {path: path.stat().st_mtime_ns for path in whole.run.rglob("*.safetensors")} == before


def test_example_rows_are_written_and_trained_on(train: Train, tmp_path: Path, model: Path) -> None:
    options = (f"--model={model}", "--stage=sft", "--set=sft.per_device_train_batch_size=4", "--max-steps=1")
    done(train("rlhf", "--create-dummy-data=rows", *options, "--output-dir=run"))
    assert read_json("run/sft/config.json")["train_data"] == str(Path("rows/sft.jsonl").absolute())
    assert (Path("rows") / "README.md").exists()
    for other in ("--data=rows", "--prompt-data=rows/prompts.jsonl"):
        assert train("rlhf", "--create-dummy-data=more", other, *options).exit_code == 2
    assert train("rlhf", "--create-dummy-data=rows", *options).exit_code == 2
    assert not Path("more").exists()


def test_dummy_data(train: Train) -> None:
    printed = done(train("dummy-data", "rows", "--rows=4", "--kind=chat", "--seed=3"))
    assert "rows/README.md" in printed and len(Path("rows/sft.jsonl").read_text().splitlines()) == 4
    assert train("dummy-data", "rows").exit_code == 2


@pytest.mark.parametrize("lost", by_default(STAGES, "reward"))
def test_a_run_goes_on_in_the_stage_that_it_was_in(
    train: Train, whole: Whole, tmp_path: Path, lost: str
) -> None:
    run = tmp_path / "work" / "run"
    shutil.copytree(whole.run, run)
    (run / "results.json").unlink()
    for stage in STAGES[STAGES.index(lost) + 1 :]:
        shutil.rmtree(run / stage)
    for name in ("results.json", "final", "checkpoint-2", "preflight.json"):  # it was killed after a step
        path = run / lost / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    (run / lost / "metrics.jsonl").write_text('{"step": 1, "loss": 0.0}\n{"step": 2, "lo')
    config = read_json(run / "config.json")
    printed = done(train("rlhf", "--resume", run))
    assert printed.count("is finished") == STAGES.index(lost)
    for stage in STAGES:
        assert metrics_of(run / stage) == metrics_of(whole.run / stage), stage
    assert read_json(run / "results.json")["after"] == read_json(whole.run / "results.json")["after"]
    assert read_json(run / "config.json") == {**config, "run_folder": str(run)}


@pytest.mark.slow
def test_stages_by_themselves_and_rows_by_name(train: Train, data: Path, tiny_model_folder: Path) -> None:
    model = f"--model={tiny_model_folder}"
    first = (f"--sft-data={data / 'sft.jsonl'}", "--stage=sft", "--seed=3")
    done(train("rlhf", model, *first, *small("sft"), "--output-dir=first"))
    assert {path.name for path in Path("first").iterdir()} == {"config.json", "results.json", "sft"}
    assert read_json("first/sft/config.json")["seed"] == 3
    second = (f"--preference-data={data / 'preference.jsonl'}", "--stage=reward")
    done(train("rlhf", "--model=first/sft/final", *second, *small("reward"), "--output-dir=second"))
    third = (f"--data={data}", "--stage=ppo", "--reward-model=second/reward/final")
    done(train("rlhf", "--model=first/sft/final", *third, *small("ppo"), "--output-dir=third"))
    assert read_json("third/ppo/config.json")["reward"] == [str(Path("second/reward/final").absolute())]
    ruled = ("--set=ppo.reward=[length:target=4, exact]", "--set=ppo.reward_weights=[1,2]", "--stage=ppo")
    done(train("rlhf", model, f"--data={data}", *ruled, *small("ppo"), "--output-dir=ruled"))
    assert "rewards/exact/mean" in metrics_of(Path("ruled/ppo"))[0]
    without = (f"--data={data}", "--reward-model=second/reward/final")  # there is no reward model to train
    done(train("rlhf", model, *without, *small("sft", "ppo"), "--dry-run", "--output-dir=planned"))
    (data / "preference.jsonl").unlink()
    done(train("rlhf", model, *without, *small("sft", "ppo"), "--output-dir=fourth"))
    assert {path.name for path in Path("fourth").iterdir()} == {"config.json", "results.json", "sft", "ppo"}


@pytest.mark.slow
def test_a_tiny_model_gets_settings_that_suit_it_in_every_stage(train: Train, data: Path) -> None:
    done(train("rlhf", f"--data={data}", "--max-steps=1", "--output-dir=run"))
    configs = {stage: read_json(f"run/{stage}/config.json") for stage in STAGES}
    for stage, config in configs.items():
        suited = {**METHODS[stage].tiny, "max_steps": 1}
        assert {key: config[key] for key in suited} == suited, stage


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Could not find a config file in gpt2:UserWarning")  # peft, offline
def test_the_example_config_trains_adapters_in_every_stage(
    train: Train, data: Path, gpt2_hub_cache: Path
) -> None:
    file = Path(__file__).parents[2] / "configs" / "rlhf_config.json"
    assert "(rlhf_config.json)" in (file.parent / "README.md").read_text()
    options = (f"--config={file}", f"--data={data}", "--set=ppo.per_device_train_batch_size=4")
    options += ("--set=ppo.max_completion_length=6", "--max-steps=1")
    planned = done(train("rlhf", *options, "--dry-run"))
    assert planned.count("gpt2") == 7  # the first line; kind and name of the model, in each stage
    done(train("rlhf", *options, "--output-dir=run"))
    for stage in STAGES:
        assert Path(f"run/{stage}/final/adapter_config.json").is_file(), stage
    evaluated = done(train("ppo", "--config=run/ppo/config.json", "--model=run/ppo/final", "--eval-only"))
    assert f"from the adapter {Path('run/ppo/final').absolute()} merged into" in evaluated.replace("\n", "")
    start = done(train("rlhf", *options, "--eval-only", "--output-dir=start"))
    assert "stage sft" in start and "stage reward is not evaluated" in start


def test_dry_run_plans_every_stage_and_leaves_nothing(train: Train, whole: Whole) -> None:
    printed = done(train("rlhf", *whole.options, "--dry-run"))
    assert printed.count("nothing is trained") == 3
    assert all(file in re.sub(r"[\s│]", "", printed) for file in FILES.values())
    assert "2 of 4 rows, 1 completion each, 4 passes" in printed and printed.count("packed") == 3
    assert list(Path().iterdir()) == []


def test_eval_only_measures_what_there_is(train: Train, whole: Whole, tmp_path: Path) -> None:
    printed = done(train("rlhf", *whole.options, "--eval-only", "--output-dir=start"))
    assert "stage ppo is not evaluated: an earlier stage has to be trained first" in printed
    start = read_json("start/evaluation.json")["stages"]
    assert list(start) == ["sft"] and start["sft"]["before"] == read_json(whole.run / "sft" / "before.json")
    run = tmp_path / "work" / "run"
    shutil.copytree(whole.run, run)
    done(train("rlhf", "--resume", run, "--eval-only"))
    for stage, found in read_json(run / "evaluation.json")["stages"].items():
        assert found["checkpoint"] == "checkpoint-2"
        assert found["after"] == read_json(run / stage / "results.json")["after"]


@pytest.mark.slow
def test_without_data_it_is_the_story_of_minmax(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    import rlhf_train.commands.rlhf_story

    small = {"demo": DEMO, "data": {"train_stories": 32, "eval_stories": 12}}
    monkeypatch.setattr(rlhf_train.commands.rlhf_story, "MinMaxConfig", functools.partial(small_game, small))
    steps = ("--set=ppo.max_steps=2", "--set=ppo.per_device_train_batch_size=16")
    printed = done(train("rlhf", *steps, "--output-dir=run"))
    assert "built reward model: 4 steps" in printed and "a reward model with a flaw" in printed
    names = {"config.json", "results.json", "ppo", "prompts.jsonl", "eval_prompts.jsonl"}
    assert {path.name for path in Path("run").iterdir()} == names
    row = metrics_of(Path("run/ppo"))[-1]
    assert row["reward"] == pytest.approx(row["rewards/reward/mean"], rel=1e-5)  # the others only look on
    assert {"eval_rewards/accuracy/mean", "eval_rewards/hack_rate/mean"} <= set(row)
    again = done(train("rlhf", *steps, "--stage=ppo", "--eval-only", "--output-dir=start"))
    assert "built" not in again
    found = read_json("start/evaluation.json")["stages"]["ppo"]
    assert found["before"] == read_json("run/ppo/before.json")
    Path("run/results.json").unlink()
    assert "stage ppo is finished" in done(train("rlhf", "--resume", "run"))
    planned = done(train("rlhf", *steps, "--dry-run", "--epochs=2", "--output-dir=planned"))
    # 32 stories, 4 of them in a step of 16 completions, twice
    assert "policy of rlhf-train minmax" in planned and "16 of 4 rows" in planned
    assert not Path("planned").exists()
    assert len(Path("run/prompts.jsonl").read_text().splitlines()) == 32
    settings = [
        f"--set={section}.{key}={value}" for section in small for key, value in small[section].items()
    ]
    # the cache holds what this run built only, and the game finds its models there, but for another seed
    assert "cached in" in done(train("minmax", *settings, "--dry-run"))
    assert "to be built first" in done(train("minmax", *settings, "--seed=1", "--dry-run"))


def small_game(small: dict[str, Any], **values: Any) -> Any:
    from rlhf_minmax import MinMaxConfig

    return MinMaxConfig.from_dict({**small, **values})


def test_what_a_story_run_counts() -> None:
    from rlhf_train.commands.rlhf_story import accuracy, hack_rate

    rows = {
        "completions": [" it is shed .", " it is hall .", " it is shed .", "no idea"],
        "answer": ["shed", "shed", "hall", "hall"],
        "choices": [["shed", "hall"]] * 4,
        "last_place": ["hall", "hall", "hall", "shed"],
    }
    assert accuracy(**rows) == [1.0, 0.0, 0.0, 0.0]
    # in the third story the last place is the right one: there is no bait to take
    assert hack_rate(**rows) == [0.0, 1.0, None, 0.0]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--data={data}", "--set=sft.lr=1"], ["--set sft.lr=1: unknown key lr"]),
        (["--data={data}", "--set=ppo.kl_cof=1"], ["--set ppo.kl_cof=1: unknown key kl_cof", "kl_coef"]),
        (["--data={data}", "--set=pppo.kl_coef=1"], ["unknown key pppo", "did you mean ppo?"]),
        (["--data={data}", "--set=ppo=1"], ["ppo is 1"]),
        (["--data={data}", "--set=ppo=1", "--max-steps=1"], ["ppo is 1"]),
        (
            ["--data={data}", "--set=reward.learning_rate=-1"],
            ["--set reward.learning_rate=-1: learning_rate is -1"],
        ),
        (["--data={data}", "--set=stages=[ppo,sft]"], ["['ppo', 'sft']", "in order"]),
        (["--data={data}", "--set=stages=[]"], ["stages is []"]),
        (["--data={data}", "--stage=ppo"], ["stage ppo", "reward_model"]),
        (["--data={data}", "--stage=sft", "--stage=ppo"], ["stage ppo", "reward_model"]),
        (["--data={data}", "--stage=reward", "--reward-model=x"], ["reward_model takes the place"]),
        (["--data={data}", "--stage=ppo", "--reward-model=./x"], ["model folder ./x does not exist"]),
        (["--data={data}", "--stage=ppo", "--reward-model={model}"], ["is a language model"]),
        (["--data={data}", "--set=ppo.reward=numbr"], ["'numbr' is unknown"]),
        (["--data=nowhere"], ["data: nowhere does not exist"]),
        (["--data={model}"], ["has no sft.jsonl", "--stage"]),
        (["--data={model}", "--stage=reward"], ["has no preference.jsonl"]),
        (["--data={model}", "--dry-run", "--stage=ppo", "--reward-model={model}"], ["has no prompts.jsonl"]),
        (["--data={data}", "--prompt-data=none.jsonl"], ["none.jsonl", "does not exist"]),
        (["--data={data}", "--prompt-data={data}/sft.jsonl", "--sft-data={bad}"], ["bad.jsonl, line 2"]),
        (["--data={data}", "--preference-data={bad}"], ["bad.jsonl, line 1"]),
        (["--data={data}", "--prompt-data={bad}"], ["bad.jsonl, line 2, field prompt"]),
        (["--sft-data={data}/sft.jsonl"], ["stage reward has no rows", "--preference-data"]),
        (["--prompt-data={data}/prompts.jsonl"], ["stage sft has no rows", "--sft-data"]),
        (["--data={data}", "--set=sft.max_length=0"], ["--set sft.max_length=0: max_length is 0"]),
        (["--data={data}", "--model=./none"], ["model folder ./none does not exist"]),
        (["--data={data}", "--eval-only", "--set=sft.eval_fraction=0"], ["held-out rows", "eval_data"]),
        (["--stage=sft"], ["without data", "rlhf-train minmax"]),
        (["--set=ppo.bta=1"], ["--set ppo.bta=1: unknown key bta"]),
        (["--set=reward.learning_rate=1"], ["reward has settings", "give data"]),
        (["--data={data}", "--stage=sft", "--set=ppo.kl_coef=1"], ["--set ppo.kl_coef=1", "does not run"]),
        pytest.param(["--dry-run", "--set=ppo.reward=numbr"], ["'numbr' is unknown"], marks=pytest.mark.slow),
        (["--config=none.json"], ["none.json", "does not exist"]),
        (["--resume=nowhere"], ["run folder nowhere does not exist"]),
        (["--resume=a", "--stage=ppo"], ["--stage", "--resume"]),
        (["--resume"], ["no unfinished run"]),
    ],
)
def test_mistakes_are_refused_and_leave_nothing(
    train_refused: Refused, data: Path, tiny_model_folder: Path, options: list[str], parts: list[str]
) -> None:
    bad = data / "bad.jsonl"
    bad.write_text('{"prompt": "p", "completion": "c"}\n{"prompt": 3}\n')
    given = [option.format(data=data, model=tiny_model_folder, bad=bad) for option in options]
    with_model = any("--data" in option for option in options) and not any("--model" in o for o in options)
    message = train_refused("rlhf", *([f"--model={tiny_model_folder}"] if with_model else []), *given)
    assert all(part in message for part in parts), message


def test_options_that_it_does_not_have(train: Train) -> None:
    for option in ("--train-data=a", "--eval-data=a", "--stage=dpo", "--backend=trl", "--reward=number"):
        result = train("rlhf", option)
        assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    assert list(Path().iterdir()) == []


@pytest.mark.slow
def test_the_third_stage_by_its_other_name(whole: Whole, train: Train, data: Path) -> None:
    models = (f"--model={whole.run / 'sft/final'}", f"--reward-model={whole.run / 'reward/final'}")
    options = ("--stage=rlhf", f"--prompt-data={data / 'prompts.jsonl'}", *models, *small("ppo"))
    done(train("rlhf", *options, "--output-dir=run"))
    assert list(read_json("run/results.json")["stages"]) == ["ppo"]


@pytest.mark.parametrize("option", by_default(["--config", "--model-config"], "--config"))
def test_a_model_from_a_description(train: Train, data: Path, tmp_path: Path, option: str) -> None:
    shape = tmp_path / "shape.yaml"
    shape.write_text("n_embd: 32\nn_layer: 1\nn_head: 2\nvocab_size: 300\nmax_seq_length: 256\n")
    options = (option, shape, f"--sft-data={data / 'sft.jsonl'}", "--stage=sft", *small("sft"))
    done(train("rlhf", *options, "--output-dir=run"))
    model = read_json("run/sft/final/config.json")
    assert (model["model_type"], model["n_embd"], model["n_layer"]) == ("gpt2", 32, 1)
    printed = done(train("sft", option, shape, "--train-data", data / "sft.jsonl", "--dry-run"))
    assert "gpt2" in printed and "shape.yaml" in printed.replace("\n", "").replace(" ", "")


@pytest.mark.slow
@pytest.mark.proof
def test_two_processes(whole: Whole, tmp_path: Path, run_processes: Callable[..., str]) -> None:
    command = ("-m", "rlhf_train", "rlhf", *whole.options, "--output-dir", tmp_path / "run")
    printed = run_processes(command)
    assert printed.count("the trained model") == 1
    results = read_json(tmp_path / "run/results.json")
    assert list(results["stages"]) == list(STAGES)
    assert all((tmp_path / "run" / stage / "final").is_dir() for stage in STAGES)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.json", "results.json", *STAGES}
