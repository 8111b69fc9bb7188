"""docs/metrics.md lists exactly the keys that the code writes."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from rlhf_algos import (
    METHODS,
    ReportConfig,
    RewardConfig,
    RewardTrainer,
    SelectionConfig,
    SFTConfig,
    SFTTrainer,
    TrainerConfig,
)
from rlhf_algos.configs.online import SamplingConfig, VLLMConfig
from rlhf_algos.configs.trainer import CapabilityConfig, ConsolidationConfig
from rlhf_algos.jobs.rlhf_config import RLHFConfig
from rlhf_algos.online.step_engine import keep_guesses
from rlhf_data import (
    KTOExample,
    PreferencePair,
    PromptExample,
    QADatasetConfig,
    RunFolder,
    StepExample,
    StepPair,
    StoryWorldConfig,
    TokenSequence,
    generate_stories,
)
from rlhf_infer import PreviousCompletions, Rollout, RuleJudge, SpeculativeDecoder, TransformersEngine
from rlhf_infer.rewards import RewardFunctions
from rlhf_minmax import MinMaxConfig, MinMaxPipeline, MinMaxTrainer
from rlhf_minmax.evaluation.break_even import BreakEven
from rlhf_minmax.evaluation.cross_play import cross_play
from rlhf_minmax.evaluation.doctor import FIRST_STEPS
from rlhf_minmax.evaluation.exploitability import BestResponse, Exploitability
from rlhf_minmax.evaluation.measure_game import measure_game
from rlhf_minmax.game.prompts import Prompts
from rlhf_minmax.game.story_rules import StoryRules
from rlhf_minmax.game.validator import Validator
from rlhf_minmax.players.past_players import Member
from rlhf_minmax.players.players import Players
from rlhf_minmax.scorers.loading import HeldOut
from rlhf_models import (
    AdapterSet,
    JudgeModel,
    PolicyModel,
    ProcessRewardModel,
    RewardEnsemble,
    RewardModel,
    add_adapters,
)

ROOT = Path(__file__).parents[2]
CONFIG = MinMaxConfig.from_dict(
    {
        "policy_model": {"max_new_tokens": 3, "baseline": "critic"},
        "monitor_model": {"max_new_tokens": 3, "baseline": "critic"},
        "training": {
            "batch_size": 2,
            "max_steps": FIRST_STEPS + 1,
            "monitor_warmup_steps": 1,
            "eval_steps": FIRST_STEPS,
        },
        "game": {"num_generations": 2, "num_critiques": 2, "policy_critiques": 1},
        "constraint": {"rule": "pid"},
    }
)
"""A game with everything on that adds keys, long enough for the run doctor to find something."""
OFFLINE_METHODS = [name for name, method in METHODS.items() if not method.online]
ONLINE_METHODS = [name for name, method in METHODS.items() if method.online]
ONLINE = "Online training: metrics.jsonl"
RECORDS = generate_stories(StoryWorldConfig(), 4, split="train", seed=0)


class LengthReward:
    """Likes long answers."""

    def score(
        self, prompts: Sequence[str], completions: Sequence[str], *, max_tokens: int | None = None
    ) -> torch.Tensor:
        return torch.tensor([float(len(text)) for text in completions])


def documented(heading: str, page: str = "metrics.md") -> list[list[str]]:
    """Cells of the table rows under `## heading` whose first cell is a key; the key without backticks."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert section, f"docs/{page} has no heading {heading!r}"
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


def keys_of(heading: str) -> set[str]:
    return {row[0] for row in documented(heading)}


def test_keys_of_the_game(pipeline: MinMaxPipeline, tmp_path: Path) -> None:
    written: set[str] = set()
    held_out = HeldOut(LengthReward(), RuleJudge())
    validated = replace(pipeline, judge=Validator(pipeline.prompts.rules))
    for name, game, adversary in (
        ("judged", pipeline, True),
        ("validated", validated, True),
        ("plain", pipeline, False),
    ):
        run = RunFolder.create(tmp_path / name)
        MinMaxTrainer(game, CONFIG, RECORDS, RECORDS, run=run, adversary=adversary, held_out=held_out).train()
        written |= {key for row in run.read_metrics() for key in row}
    of_step = {key for key in written if not key.startswith("eval_")}
    of_one = re.compile(r"(constraint|dual)/(\w+)/")
    general = {of_one.sub(r"\1/<name>/", key) for key in of_step}
    assert general == keys_of("The game: metrics.jsonl") | keys_of("The game: constraints and dynamics")
    names = {match[2] for match in map(of_one.match, of_step) if match}
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in names)
    blocks, _, _ = results_tables()
    starred = {row[0] for row in blocks if row[1:2] == ["*"]}
    assert set(measure_game(pipeline, RECORDS, pipeline.players.policy, held_out)) == starred
    assert written - of_step == {f"eval_{key}" for key in starred}


def test_keys_of_how_good_the_players_are(pipeline: MinMaxPipeline) -> None:
    past = [Member.of(1, player) for player in (pipeline.players.policy, pipeline.players.monitor)]
    table = cross_play(pipeline, past[:1], past[1:], RECORDS).to_metrics()
    crossed = {re.sub(r"1_1$", "<i>_<j>", re.sub(r"/1$", "/<i>", key)) for key in table}
    probed = {key for role in ("policy", "monitor") for key in BestResponse(role, 0.0, 0.0, 0.0).to_metrics()}
    blocks = {row[0] for row in results_tables()[0]}
    measured = set(Exploitability(0.0, 0.0, 0.0).to_metrics()) | {
        key for key in blocks if re.match(r"minmax/(heldout|hacking)", key)
    }
    assert keys_of("The game: how good the players are") == crossed | probed | measured
    assert crossed | measured <= blocks


def test_keys_of_results() -> None:
    source = (ROOT / "packages/rlhf-minmax/src/rlhf_minmax/run/minmax_job.py").read_text(encoding="utf-8")
    (play,) = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == "_play"]
    dicts = [n.value for n in ast.walk(play) if isinstance(n, ast.Assign) and isinstance(n.value, ast.Dict)]
    written = {key.value for node in dicts for key in node.keys if isinstance(key, ast.Constant)}
    _, beside, break_even = results_tables()
    assert written == beside | {"before", "plain", "after"}
    assert break_even == {field.name for field in fields(BreakEven)}


def trainers(language_model: Any, tokenizer: Any) -> dict[str, Any]:
    """A trainer of every kind that takes one step and evaluates, by its name in the table."""
    one, two = TokenSequence([5, 6, 7], 1), TokenSequence([5, 6, 8], 1)
    step = StepExample(one, (1, 2), (1.0, 0.0))
    pairs, labelled = [PreferencePair(one, two)], [KTOExample(one, True, two), KTOExample(two, False, one)]
    scalar = RewardModel.from_backbone(language_model, tokenizer, seed=0)
    ensemble = RewardEnsemble.from_backbone(language_model, tokenizer, size=2, kind="heads")
    process = ProcessRewardModel.from_backbone(language_model, tokenizer, seed=0)
    rows = {"sft": [one], "preference": pairs, "kto": labelled, "steps": [StepPair(step, step)]}
    judge = JudgeModel.from_backbone(language_model, tokenizer, seed=0)
    models = {"policy": language_model, "reward": scalar, "judge": judge, "prm": process}
    made = {
        name: (method.trainer_class, models[method.model], method.config_class, rows[method.records])
        for name, method in METHODS.items()
        if not method.online
    }
    made |= {"ensemble": (RewardTrainer, ensemble, RewardConfig, pairs)}
    return {
        name: trainer(model, config(max_steps=1), rows, eval_examples=rows)
        for name, (trainer, model, config, rows) in made.items()
    }


def expected_keys(name: str) -> set[str]:
    """What the table says that a trainer logs in a step with an evaluation."""
    rows = [(row[0], row[1]) for row in documented("Trainers: metrics.jsonl")]
    own = {key for key, whose in rows if name in whose.split(", ")}
    evaluated = {f"eval_{key}" for key in {"loss", *own} if not key.startswith("eval_")}
    return {key for key, whose in rows if whose == "all"} | own | evaluated


def test_keys_of_the_trainers(tiny_llama: Any, byte_tokenizer: Any) -> None:
    for name, trainer in trainers(tiny_llama, byte_tokenizer).items():
        written = {re.sub(r"/\d+$", "/<k>", key) for key in trainer.train()}
        assert written | {"step"} == expected_keys(name), name


def test_keys_of_models_with_experts() -> None:
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    shape |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    model = AutoModelForCausalLM.from_config(MixtralConfig(vocab_size=32, **shape))
    rows = [TokenSequence([5, 6, 7], 1)]
    written = set(SFTTrainer(model, SFTConfig(max_steps=1), rows, eval_examples=rows).train())
    own = {row[0] for row in documented("Models with experts: metrics.jsonl")}
    assert written | {"step"} == expected_keys("sft") | own | {f"eval_{key}" for key in own}


def test_the_settings_of_safeguards_are_listed() -> None:
    rows = documented("Capabilities during training", "methods/README.md")
    listed = {row[0]: json.loads(row[1].strip("`")) for row in rows}
    assert listed == CapabilityConfig().to_dict()
    rows = documented("Holding weights", "methods/README.md")
    assert {row[0]: json.loads(row[1].strip("`")) for row in rows} == ConsolidationConfig().to_dict()


def test_every_method_page_lists_the_methods_keys() -> None:
    shared = {row[0] for row in documented("Trainers: metrics.jsonl") if row[1] == "all"} - {"loss"}
    for name in OFFLINE_METHODS:
        config = METHODS[name].config_class
        sections = [name, "ensemble"] if name == "reward" else [name]
        alone = ("eval_calibration", "eval_ref_kl")
        expected = set().union(*(expected_keys(section) for section in sections)) - shared
        expected = {key for key in expected if not key.startswith("eval_") or key in alone}
        page = f"methods/{name}.md"
        assert {row[0] for row in documented("Metrics", page)} == expected, name
        elsewhere = {*CapabilityConfig.model_fields, *ConsolidationConfig.model_fields}
        shared_settings = {*TrainerConfig.model_fields, *elsewhere}
        own = set(config.model_fields) - shared_settings | {"learning_rate"}
        listed = {row[0]: json.loads(row[1].strip("`")) for row in documented("Settings", page)}
        assert listed == {key: config().to_dict()[key] for key in own}, name


def online_trainer(name: str, language_model: Any, tokenizer: Any) -> Any:
    """A trainer that takes one step, in which every key of its method has something to measure."""
    chosen = {"max_steps": 1, "num_generations": 4, "per_device_train_batch_size": 8, "use_vllm": True}
    chosen |= {"max_completion_length": 12, "overlong_buffer": 2, "stop": list("aeiorst")}
    chosen |= {"num_generations_eval": 2}
    chosen |= {"beta": 0.1} if name == "grpo" else {}
    prompts = [PromptExample(f"prompt {i}", (5, 6, 7 + i), {}) for i in range(2)]
    rewards = RewardFunctions(
        [lambda completions: [float(len(text)) for text in completions]], names=["long"]
    )
    trainer: Any = METHODS[name].trainer_class
    return trainer(
        language_model,
        METHODS[name].config_class.from_dict(chosen),
        prompts,
        eval_examples=prompts * 2,
        rewards=rewards,
        tokenizer=tokenizer,
        engine=TransformersEngine(language_model, tokenizer),
    )


@pytest.mark.parametrize("name", ONLINE_METHODS)
def test_keys_of_online_training(name: str, tiny_llama: Any, byte_tokenizer: Any) -> None:
    trainer = online_trainer(name, tiny_llama, byte_tokenizer)
    written = {key.replace("/long/", "/<function>/") for key in trainer.train()}
    guessing = SpeculativeDecoder(tiny_llama, byte_tokenizer, PreviousCompletions())
    found = dict[str, float]()
    for _ in range(2):  # the second epoch has something to compare
        found = keep_guesses(guessing, [[Rollout([5], [7], [0.0], "stop")]])
    written |= found.keys()
    shared = {row[0] for row in documented("Trainers: metrics.jsonl") if row[1] == "all"}
    rows = [row for row in documented(ONLINE) if name in row[1].split(", ")]
    starred = {f"eval_{row[0]}" for row in rows if row[2] == "*"}
    assert written | {"step"} == shared | {row[0] for row in rows} | starred


@pytest.mark.parametrize("name", ONLINE_METHODS)
def test_every_online_page_lists_the_methods_keys(name: str) -> None:
    page = f"methods/{name}.md"
    assert {row[0] for row in documented("Metrics", page)} == {
        row[0] for row in documented(ONLINE) if row[1] == name
    }
    config, plain = METHODS[name].config_class(), TrainerConfig().to_dict()
    elsewhere = {*SamplingConfig.model_fields, *VLLMConfig.model_fields, *CapabilityConfig.model_fields}
    own = {
        key: value
        for key, value in config.to_dict().items()
        if key not in elsewhere and (key not in plain or plain[key] != value)
    }
    assert settings("Settings", page) == own


def settings(heading: str, page: str) -> dict[str, Any]:
    """Keys and defaults of a table of settings."""
    return {row[0]: json.loads(row[1].strip("`")) for row in documented(heading, page)}


def test_settings_of_engines_and_of_rlhf() -> None:
    assert settings("Settings: sampling", "engines.md") == SamplingConfig().to_dict()
    assert settings("Settings: vLLM", "engines.md") == VLLMConfig().to_dict()
    assert settings("Settings", "methods/rlhf.md") == RLHFConfig().to_dict()


def test_settings_around_the_games_steps() -> None:
    listed = settings("Around the steps", "minmax.md")
    training = MinMaxConfig().training.to_dict()
    shared = {*SelectionConfig.model_fields, *ReportConfig.model_fields, "optim"}
    assert listed == {key: training[key] for key in (*shared, "eval_steps", "save_steps", "save_total_limit")}


def test_shared_settings_are_those_of_the_config() -> None:
    listed = {row[0]: json.loads(row[1].strip("`")) for row in documented("Settings", "methods/README.md")}
    assert listed == TrainerConfig().to_dict()


def test_method_pages_lead_somewhere_and_are_listed() -> None:
    folder = ROOT / "docs" / "methods"
    index = (folder / "README.md").read_text(encoding="utf-8")
    for page in folder.glob("*.md"):
        for link in re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8")):
            assert link.startswith("https://") or (folder / link).exists(), f"{page.name}: {link}"
        assert page.name == "README.md" or f"({page.name})" in index, page.name
