"""Model cards: a header the hub reads, code that runs, numbers as measured."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForSequenceClassification

from rlhf_algos import METHODS
from rlhf_algos.jobs.results import write_model_card
from rlhf_data import apply_overrides
from rlhf_models import LoraSettings, RewardModel, apply_lora

CONFIG = {
    "model_name_or_path": "org/base-1b",
    "train_data": "pairs.jsonl",
    "learning_rate": 1e-6,
    "beta": 0.1,
    "max_steps": -1,
    "lora_target_modules": None,
}
RESULTS = {
    "before": {"eval_loss": 0.6931472, "eval_rewards/accuracies": 0.0},
    "after": {"eval_loss": 0.5, "eval_rewards/accuracies": 0.75},
    "steps": 1200,
    "num_tokens": 3456789,
    "wall_time": {"training": 10.0, "total": 12.34},
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
}


def _card(folder):
    card = ModelCard.load(folder / "README.md")
    return card.data.to_dict(), card.text


def _code(folder):
    text = (folder / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)\n```", text, flags=re.DOTALL)
    return code.replace("path/to/this/folder", str(folder))


def _run(code, capsys):
    exec(compile(code, "README.md", "exec"), {})
    return capsys.readouterr().out


def test_header_recipe_and_numbers(tmp_path):
    write_model_card(tmp_path, method="dpo", config=CONFIG, results=RESULTS)
    header, text = _card(tmp_path)
    assert header == {
        "base_model": "org/base-1b",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rlhf-algos", "dpo"],
    }
    assert (
        "Model trained with direct preference optimization (DPO) ([arXiv:2305.18290]"
        "(https://arxiv.org/abs/2305.18290)) from `org/base-1b` on `pairs.jsonl`."
    ) in text
    for line in (
        "| eval_loss | 0.6931 | 0.5 |",
        "| eval_rewards/accuracies | 0 | 0.75 |",
        "| learning_rate | 1e-06 |",
        "| beta | 0.1 |",
        "| steps | 1,200 |",
        "| tokens | 3,456,789 |",
        "| wall time in seconds | 12.3 |",
        "- torch 2.13.0",
    ):
        assert line in text.splitlines()
    assert "| max_steps" not in text
    (settings,) = re.findall(r"```json\n(.*?)\n```", text, flags=re.DOTALL)
    assert json.loads(settings) == CONFIG


@pytest.mark.parametrize("method", METHODS)
def test_the_table_has_the_settings_of_the_method_itself(tmp_path, method):
    """Also of one that is added later."""
    config = METHODS[method].resolve({}).to_dict()
    write_model_card(tmp_path, method=method, config=config, results=RESULTS)
    table = dict(re.findall(r"^\| (\w+) \| (.*) \|$", _card(tmp_path)[1], flags=re.MULTILINE))
    own = METHODS[method].config_class
    inherited = {name for base in own.__bases__ for name in base.model_fields}
    shown = {name for name in own.model_fields if name not in inherited and config[name] is not None}
    assert shown | {"learning_rate", "seed"} <= table.keys()
    assert method != "simpo" or (table["cpo_alpha"], table["simpo_gamma"]) == ("0", "1")
    assert method != "prm" or table["step_separator"] == "\\n"


@pytest.mark.parametrize("base", [None, "/models/base", "./base", "models\\base", "outputs/sft/final"])
def test_a_base_model_that_is_not_on_the_hub_is_not_linked(tmp_path, base, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "final").mkdir()
    write_model_card(tmp_path / "final", method="kto", config={}, base_model=base, data="rows")
    header, text = _card(tmp_path / "final")
    assert header.get("base_model") is None and "Versions" not in text and "Held-out" not in text
    assert f"# {tmp_path.name}\n" in text  # the run's name
    assert "on `rows`." in text and (
        base is None or f"from `{'...' if base.startswith('/') else ''}{base}`" in text
    )


def test_a_folder_with_a_hub_like_name_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "base-1b").mkdir(parents=True)
    write_model_card(tmp_path, method="dpo", config=CONFIG)
    assert "base_model" not in _card(tmp_path)[0]


def test_local_paths_are_not_published(tmp_path):
    home = str(tmp_path / "of a person")
    config = {
        "model_name_or_path": f"{home}/sft/final",
        "train_data": f"{home}/data/pairs.jsonl",
        "reward": [f"{home}/mine/happy.py:happy", "https://scores.example/get_reward", "math"],
        "run_folder": home,
    }
    write_model_card(tmp_path, method="grpo", config=config)
    header, text = _card(tmp_path)
    assert "of a person" not in text and str(tmp_path) not in text and "base_model" not in header
    assert "from `.../sft/final` on `.../data/pairs.jsonl`" in text
    assert '".../mine/happy.py:happy"' in text and "https://scores.example/get_reward" in text


def test_another_method_is_called_by_its_name(tmp_path):
    write_model_card(tmp_path, method="mine", config={})
    header, text = _card(tmp_path)
    assert "Model trained with mine." in text and header.get("tags") == ["rlhf-algos", "mine"]


def test_the_code_for_a_language_model_runs(tmp_path, tiny_llama, byte_tokenizer, capsys):
    tiny_llama.save_pretrained(tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    write_model_card(tmp_path, method="sft", config={})
    assert "Where is Mary?" in _run(_code(tmp_path), capsys)


def test_the_code_for_an_adapter_runs(tmp_path, tiny_model_folder, byte_tokenizer, capsys):
    from rlhf_models import load_causal_lm

    model = apply_lora(load_causal_lm(str(tiny_model_folder)), LoraSettings(lora_r=2))
    model.save_pretrained(tmp_path / "final")
    byte_tokenizer.save_pretrained(tmp_path / "final")
    write_model_card(tmp_path / "final", method="dpo", config={})
    header, text = _card(tmp_path / "final")
    assert header.get("library_name") == "peft" and header.get("tags") == ["rlhf-algos", "dpo", "lora"]
    assert "LoRA adapter trained with" in text
    assert "Where is Mary?" in _run(_code(tmp_path / "final"), capsys)


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_the_code_for_a_reward_model_runs(tmp_path, tiny_llama, byte_tokenizer, capsys, head):
    model = RewardModel.from_backbone(tiny_llama, byte_tokenizer, head=head)
    model.save_pretrained(tmp_path)
    write_model_card(tmp_path, method="reward", config={})
    header, text = _card(tmp_path)
    assert header.get("pipeline_tag") == "text-classification"
    assert _run(_code(tmp_path), capsys).strip().startswith("tensor([")
    said = "`transformers.AutoModelForSequenceClassification` loads it too." in text
    assert said is (head == "linear")
    if said:
        assert AutoModelForSequenceClassification.from_pretrained(tmp_path).config.num_labels == 1


@pytest.mark.parametrize("method", ["reward", "prm"])
def test_the_code_for_ensembles_and_process_models_runs(tmp_path, tiny_llama, byte_tokenizer, capsys, method):
    from rlhf_models import ProcessRewardModel, RewardEnsemble

    if method == "prm":
        model = ProcessRewardModel.from_backbone(tiny_llama, byte_tokenizer)
    else:
        model = RewardEnsemble.from_backbone(tiny_llama, byte_tokenizer, size=2, kind="heads")
    model.save_pretrained(tmp_path)
    write_model_card(tmp_path, method=method, config={})
    assert _run(_code(tmp_path), capsys).strip().startswith("tensor([")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("own", [False, True])
def test_the_command_of_a_card_gives_the_settings_again(method: str, own: bool, tmp_path: Path) -> None:
    given = {"model_name_or_path": "org/model", "train_data": "rows", "max_steps": 3, "learning_rate": 3e-5}
    given |= {"reward": ["number"]} if METHODS[method].online else {}
    config = METHODS[method].resolve({**(given if own else {}), "seed": 7}).to_dict()
    config |= (
        {"model_name_or_path": "org/model", "train_data": "rows"} if own else {}
    )  # no path of this machine
    write_model_card(tmp_path, method=method, config=config)
    lines = (tmp_path / "README.md").read_text(encoding="utf-8").splitlines()
    _, named, *rest = shlex.split(next(line for line in lines if line.startswith("rlhf-train ")))
    keys = {"--model": "model_name_or_path", "--train-data": "train_data", "--seed": "seed"}
    pairs = list(zip(rest[::2], rest[1::2], strict=True))
    words = [value if option == "--set" else f"{keys[option]}={value}" for option, value in pairs]
    assert named == method and len(words) == (len(given) + 1 if own else 1)
    again = METHODS[method].resolve(apply_overrides({}, words)).to_dict()
    assert again | {"train_data": config["train_data"]} == config


def test_the_command_shows_that_paths_are_cut(tmp_path):
    given = {"model_name_or_path": f"{tmp_path}/my models/sft", "train_data": f"{tmp_path}/rows.jsonl"}
    write_model_card(tmp_path, method="dpo", config=METHODS["dpo"].resolve(given).to_dict())
    text = _card(tmp_path)[1]
    assert "in place of `...`:" in text and f"--train-data .../{tmp_path.name}/rows.jsonl" in text
    assert "--model '.../my models/sft'" in text
