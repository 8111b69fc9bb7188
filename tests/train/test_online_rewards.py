"""`--reward` of `rlhf-train grpo|ppo`: models, ensembles, code, URLs, rules; alone and together."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from files import done, metrics_of, read_json

Train = Callable[..., Result]
FEW = (
    *("--set=story_rows=8", "--set=story_eval_rows=4", "--set=per_device_train_batch_size=8"),
    *("--set=num_generations=4", "--set=max_completion_length=8", "--set=learning_rate=1e-3"),
)
REWARDS = """
def characters(completions, **columns):
    return [float(len(text)) for text in completions]


async def characters_later(completions, **columns):
    return characters(completions)


def names_its_place(completions, answer, last_place):
    return [None if gold == last else float(gold in text)
            for text, gold, last in zip(completions, answer, last_place, strict=True)]


class Scaled:
    def __init__(self, by=2.0):
        self.by = by

    def __call__(self, completions):
        return [self.by * len(text) for text in completions]
"""


class Scorer(BaseHTTPRequestHandler):
    """Rewards every completion with its number of characters."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert set(asked) == {"prompts", "completions", "columns"}
        answer = json.dumps({"rewards": [len(text) for text in asked["completions"]]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    """A scorer that speaks the protocol, on this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Scorer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/score"
        server.shutdown()


@pytest.fixture(scope="module")
def reward_models(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a reward model `one` and an ensemble `two`, trained by the command."""
    from rlhf_train.cli import main

    folder = tmp_path_factory.mktemp("reward")
    few = ("--set=story_rows=8", "--set=story_eval_rows=2", "--max-steps=1", "--set=learning_rate=1e-2")
    heads = ("--set=num_members=2", "--set=ensemble=heads")
    for name, settings in (("one", ()), ("two", heads)):
        options = (f"--model={model}", *few, *settings, f"--output-dir={folder / name}-run")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rlhf_eval.training_curves", lambda *args, **options: None)
            done(CliRunner().invoke(main, ["reward", *options]))
        shutil.move(folder / f"{name}-run" / "final", folder / name)
    return folder


@pytest.fixture
def evaluated(train: Train, model: Path) -> Callable[..., dict[str, float]]:
    """The held-out metrics of the start model, which are those of the same completions every time."""
    count = iter(range(100))

    def evaluate(*rewards: Any, settings: tuple[str, ...] = ()) -> dict[str, float]:
        run = f"run-{next(count)}"
        chosen = [f"--reward={reward}" for reward in rewards]
        options = (f"--model={model}", *FEW, *settings, *chosen, "--eval-only", f"--output-dir={run}")
        done(train("grpo", *options))
        return read_json(f"{run}/evaluation.json")["before"]

    return evaluate


def test_every_kind_of_reward(
    evaluated: Callable[..., dict[str, float]], reward_models: Path, url: str
) -> None:
    Path("kinds_of_reward.py").write_text(REWARDS)
    # all four completions have the 8 tokens that there may be; length:target=4 gives 4 / (4 + |8 - 4|)
    assert evaluated("length:target=8")["eval_reward"] == 1
    assert evaluated("length:target=4")["eval_reward"] == pytest.approx(0.5)
    found = {
        name: evaluated(reward)
        for name, reward in (
            ("characters", "kinds_of_reward:characters"),
            ("characters_later", "kinds_of_reward.characters_later"),
            ("Scaled", "kinds_of_reward.py:Scaled"),
            ("remote", url),
            ("one", reward_models / "one"),
            ("two", reward_models / "two"),
            ("format", "format:pattern=.*"),
        )
    }
    for name, metrics in found.items():
        assert metrics["eval_reward"] == metrics[f"eval_rewards/{name}/mean"], name
    characters = found["characters"]["eval_reward"]
    assert characters > 4
    assert found["characters_later"]["eval_reward"] == found["remote"]["eval_reward"] == characters
    assert found["Scaled"]["eval_reward"] == 2 * characters
    assert found["format"]["eval_reward"] == 1
    assert found["one"]["eval_rewards/one/std"] > 0


def test_principles_each_under_its_name(evaluated: Callable[..., dict[str, float]]) -> None:
    principles = [{"name": "any", "weight": 0.5, "pattern": "."}, {"name": "z", "pattern": "zzz"}]
    Path("rules.json").write_text(json.dumps({"principles": principles}))
    found = evaluated("constitutional:principles=rules.json,base=length:target=8")
    # the base gives 1; a pattern that is found costs 1, here at half weight, and one that is not nothing
    assert found["eval_reward"] == pytest.approx(1 - 0.5)
    assert {f"eval_rewards/{name}/mean" for name in ("length", "constitution/any")} <= set(found)


def test_an_ensemble_counts_less_where_its_members_disagree(
    evaluated: Callable[..., dict[str, float]], reward_models: Path
) -> None:
    two = reward_models / "two"
    mean, cautious = (evaluated(f"model:path={two},k={k}")["eval_reward"] for k in (0, 1))
    assert cautious == evaluated(two)["eval_reward"] < mean


@pytest.mark.slow
def test_several_rewards_with_weights_are_trained_on(
    train: Train, model: Path, reward_models: Path, url: str
) -> None:
    Path("weighted_rewards.py").write_text(REWARDS)
    weights = {"one": 1.0, "two": 0.5, "names_its_place": 2.0, "remote": -0.25, "length": 0.0}
    sources = (
        reward_models / "one",
        reward_models / "two",
        "weighted_rewards:names_its_place",
        url,
        "length:target=8",
    )
    chosen = [f"--reward={source}" for source in sources]
    options = (*FEW, "--max-steps=2", *chosen, f"--set=reward_weights={list(weights.values())}")
    done(train("ppo", f"--model={model}", *options, "--output-dir=run"))
    for row in metrics_of(Path("run")):
        assert {key for key in row if key.startswith("rewards/")} >= {f"rewards/{n}/mean" for n in weights}
        # `names_its_place` does not apply everywhere, so its mean is no part of the sum; it is 0 here
        assert row["rewards/names_its_place/mean"] == 0
        total = sum(weight * row[f"rewards/{name}/mean"] for name, weight in weights.items())
        assert row["reward"] == pytest.approx(total, rel=1e-5)


def test_ppo_values_start_from_a_reward_model(train: Train, model: Path, reward_models: Path) -> None:
    from safetensors.torch import load_file

    one = reward_models / "one"
    options = (
        *FEW,
        "--reward=length:target=4",
        f"--set=value_model_path={one}",
        "--max-steps=1",
        "--set=vf_coef=0",
    )
    done(train("ppo", f"--model={model}", *options, "--output-dir=run"))
    mine = load_file("run/final/value_model/model.safetensors")
    start = load_file(one / "model.safetensors")
    assert set(mine) == {*start, "score.bias"}  # where values begin, which a reward model does not have
    assert all(bool((mine[name] == start[name]).all()) for name in start)  # no value loss, so nothing moves


@pytest.mark.slow
def test_a_reward_that_fails_on_the_way_can_be_mended(train: Train, model: Path) -> None:
    score = "def score(completions, trainer_state):\n    return [float(len(text)) for text in completions]\n"
    broken = score.replace(":\n", ":\n    assert trainer_state.global_step < 2, 'no more'\n", 1)
    options = ("grpo", f"--model={model}", *FEW, "--max-steps=3", "--reward=mine.py:score")
    Path("mine.py").write_text(score)
    done(train(*options, "--output-dir=whole"))
    for text, arguments in ((broken, (*options, "--output-dir=run")), (score, ("grpo", "--resume=run"))):
        for name in [name for name in sys.modules if name.startswith("user_file_mine")]:
            del sys.modules[name]
        Path("mine.py").write_text(text)
        result = train(*arguments)
        if text == broken:
            assert result.exit_code == 2 and result.stderr.count("\n") == 1
            assert "reward function score" in result.stderr and "AssertionError: no more" in result.stderr
            assert len(metrics_of(Path("run"))) == 2
    done(result)
    assert metrics_of(Path("run")) == metrics_of(Path("whole"))
