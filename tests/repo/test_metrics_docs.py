"""docs/metrics.md lists exactly the keys that the code writes."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_algos import (
    LabelledSequence,
    RewardConfig,
    RewardTrainer,
    ScalarConfig,
    ScalarTrainer,
    SFTConfig,
    SFTTrainer,
)
from rlhf_data import QADatasetConfig, RunFolder, StoryWorldConfig, TokenSequence, generate_stories
from rlhf_infer import RuleJudge
from rlhf_minmax import MinMaxConfig, MinMaxPipeline, MinMaxTrainer
from rlhf_minmax.break_even import BreakEven
from rlhf_minmax.evaluate import evaluate
from rlhf_minmax.players import Players
from rlhf_minmax.prompts import Prompts
from rlhf_minmax.story_rules import StoryRules
from rlhf_models import AdapterSet, PolicyModel, RewardModel, add_adapters

ROOT = Path(__file__).parents[2]
CONFIG = MinMaxConfig.from_dict(
    {
        "policy_model": {"max_new_tokens": 3},
        "monitor_model": {"max_new_tokens": 3},
        "training": {"batch_size": 2, "max_steps": 2, "monitor_warmup_steps": 1, "eval_steps": 2},
        "game": {"num_generations": 2, "num_critiques": 2, "policy_critiques": 1},
    }
)
RECORDS = generate_stories(StoryWorldConfig(), 4, split="train", seed=0)


class LengthReward:
    """Likes long answers."""

    def score(
        self, prompts: Sequence[str], completions: Sequence[str], *, max_tokens: int | None = None
    ) -> torch.Tensor:
        return torch.tensor([float(len(text)) for text in completions])


def documented(heading: str) -> list[list[str]]:
    """Cells of the table rows under `## heading` whose first cell is a key; the key without backticks."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert section, f"docs/metrics.md has no heading {heading!r}"
    rows = [line.strip("| ").split(" | ") for line in section[1].splitlines() if line.startswith("| `")]
    return [[row[0].strip("` "), *(cell.strip("| ") for cell in row[1:])] for row in rows]


def results_tables() -> tuple[list[list[str]], set[str], set[str]]:
    """Of results.json: rows of the blocks, keys beside the blocks, keys of the break-even check."""
    rows = documented("The game: results.json")
    blocks = [row for row in rows if "/" in row[0]]
    start = [row[0] for row in rows].index("delta_reward")
    beside = {row[0] for row in rows[len(blocks) : start]}
    return blocks, beside, {row[0] for row in rows[start:]}


@pytest.fixture
def pipeline(tiny_llama: Any, byte_tokenizer: Any) -> MinMaxPipeline:
    adapters = AdapterSet(add_adapters(tiny_llama, ["policy", "monitor"]))
    policy, monitor = (
        PolicyModel(None, byte_tokenizer, adapters=adapters, adapter=name) for name in ("policy", "monitor")
    )
    players = Players(policy, monitor, None, shared=True)
    return MinMaxPipeline(
        players, LengthReward(), RuleJudge(), Prompts(QADatasetConfig(), StoryRules()), CONFIG
    )


def test_keys_of_the_game(pipeline: MinMaxPipeline, tmp_path: Path) -> None:
    written: set[str] = set()
    for adversary in (True, False):
        run = RunFolder.create(tmp_path / str(adversary))
        MinMaxTrainer(pipeline, CONFIG, RECORDS, RECORDS, run=run, adversary=adversary).train()
        written |= {key for row in run.read_metrics() for key in row}
    of_step = {key for key in written if not key.startswith("eval/")}
    assert of_step == {row[0] for row in documented("The game: metrics.jsonl")}
    blocks, _, _ = results_tables()
    starred = {row[0] for row in blocks if row[1:2] == ["*"]}
    assert set(evaluate(pipeline, RECORDS, pipeline.players.policy)) == starred
    assert written - of_step == {f"eval/{key}" for key in starred}


def test_keys_of_results() -> None:
    source = (ROOT / "packages/rlhf-minmax/src/rlhf_minmax/job.py").read_text(encoding="utf-8")
    (play,) = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == "play"]
    dicts = [n.value for n in ast.walk(play) if isinstance(n, ast.Assign) and isinstance(n.value, ast.Dict)]
    written = {key.value for node in dicts for key in node.keys if isinstance(key, ast.Constant)}
    _, beside, break_even = results_tables()
    assert written == beside | {"before", "plain", "after"}
    assert break_even == {field.name for field in fields(BreakEven)}


def test_keys_of_the_trainers(tiny_llama: Any, byte_tokenizer: Any) -> None:
    scalar = RewardModel.from_backbone(tiny_llama, byte_tokenizer, seed=0)
    one, two = TokenSequence([5, 6, 7], 1), TokenSequence([5, 6, 8], 1)
    trainers = {
        "SFT": SFTTrainer(tiny_llama, SFTConfig(max_steps=1), [one], eval_examples=[two]),
        "reward": RewardTrainer(scalar, RewardConfig(max_steps=1), [(one, two)], eval_examples=[(two, one)]),
        "scalar": ScalarTrainer(
            scalar,
            ScalarConfig(max_steps=1),
            [LabelledSequence(one, 1.0)],
            eval_examples=[LabelledSequence(two, 0.0)],
        ),
    }
    rows = documented("Trainers: metrics.jsonl")
    for name, trainer in trainers.items():
        expected = {row[0] for row in rows if row[1] == "all" or name in row[1].split(", ")}
        assert set(trainer.train()) | {"step"} == expected, name
