"""Code that comes with a model is never run, whoever says yes to it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from raises import raises_error
from rlhf_models import load_causal_lm, load_tokenizer

CODE = """
from pathlib import Path
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

Path({marker!r}).touch()


class Own(PreTrainedConfig):
    model_type = "own"


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def with_code(tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A model whose classes are in its folder, a terminal that says yes, and what the code would leave."""
    folder, marker = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(tiny_model_folder, folder)
    (folder / "own.py").write_text(CODE.format(marker=str(marker)))
    for file, changes in {
        "config.json": {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}},
        "tokenizer_config.json": {
            "tokenizer_class": "OwnTokenizer",
            "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]},
        },
    }.items():
        values = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(values | changes))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    return folder, marker


@pytest.mark.parametrize("load", [load_causal_lm, load_tokenizer])
def test_code_of_a_model_is_refused_and_not_run(load, with_code: tuple[Path, Path]):
    folder, marker = with_code
    with raises_error("remote_code", name=str(folder)):
        load(folder)
    assert not marker.exists()


def test_code_is_passed_over_where_transformers_has_the_architecture(
    with_code: tuple[Path, Path], tiny_model_folder: Path
):
    folder, marker = with_code
    config = json.loads((tiny_model_folder / "config.json").read_text())
    own = {"auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config | own))
    assert type(load_causal_lm(folder)).__module__.startswith("transformers.models.")
    assert not marker.exists()
