"""`rlhf-train minmax --quick`: a first look, with models that come with the package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from files import done, read_json
from rlhf_minmax import MinMaxConfig
from rlhf_train.commands.minmax import resolve_config

NOT_GIVEN = (
    *("config", "distributed", "reward_model", "judge_model", "model", "policy", "monitor", "train_data"),
    *("eval_data", "max_steps", "epochs", "on_bad_row", "seed", "no_baseline", "force"),
)


def _resolved(*overrides: str, **options: Any) -> MinMaxConfig:
    return resolve_config({**dict.fromkeys(NOT_GIVEN), "quick": True, "overrides": overrides, **options})


def test_what_is_given_beside_it_holds() -> None:
    quick = _resolved()
    assert quick.demo.prebuilt and quick.training.max_steps == 40 and quick.data.eval_stories == 256
    assert _resolved("training.max_steps=7", seed=3).training.max_steps == 7
    assert _resolved(max_steps=9).training.max_steps == 9
    assert _resolved(epochs=0.5).training.max_steps == -1
    assert not _resolved("demo.prebuilt=false").demo.prebuilt


def test_it_is_over_a_config_file(tmp_path: Path) -> None:
    config = tmp_path / "game.yaml"
    config.write_text("training: {max_steps: 7, batch_size: 4}\ndemo: {prebuilt: false}\n")
    quick = _resolved(config=config)
    assert quick.demo.prebuilt and (quick.training.max_steps, quick.training.batch_size) == (40, 4)


def test_other_rows_are_refused(refused: Callable[..., str], rows_file: Callable[..., Path]) -> None:
    assert "--quick" in refused("--quick", "--train-data", rows_file())
    assert "--quick" in refused("--quick", "--set", "data.world=sums", "--dry-run")
    assert "--rebuild-demo" in refused("--quick", "--rebuild-demo", "--dry-run")


@pytest.mark.slow
def test_a_game_builds_nothing(cli: Callable[..., Result], tmp_path: Path) -> None:
    sizes = ("data.eval_stories=4", "data.train_stories=8", "training.batch_size=2", "data.probe_stories=2")
    words = [word for size in sizes for word in ("--set", size)]
    done(cli("--quick", "--max-steps", 2, "--no-baseline", "--force", "--output-dir", "run", *words))
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert (
        read_json("run/results.json")["wall_time"]["demo"]
        < read_json("run/results.json")["wall_time"]["total"]
    )
    assert "--set demo.prebuilt=true" in Path("run/report.html").read_text()


@pytest.mark.slow
def test_it_shows_that_plain_training_is_fooled_and_the_game_is_not(cli: Callable[..., Result]) -> None:
    done(cli("--quick", "--output-dir", "run"))
    results = read_json("run/results.json")
    start, plain, game = (results[block]["policy/accuracy"] for block in ("before", "plain", "after"))
    assert plain < start < game and game > 0.9
