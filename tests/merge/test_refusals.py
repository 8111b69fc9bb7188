"""Inputs and options that a merge refuses before it reads or writes tensors."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from raises import raises_error
from rlhf_merge import MergeError, ModelMerger, ModelSoup
from rlhf_merge.files.weight_file import OpenFile
from rlhf_merge.files.weight_index import read_json

HEADED = {"v_head.summary.weight": torch.ones(1, 8)}


def refusal(values: dict[str, Any], out: Path) -> str:
    with pytest.raises(MergeError) as caught:
        ModelMerger(values).merge(out)
    assert not out.exists()
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"],
)
@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_something_else_than_a_file_in_a_models_folder(workshop: Any, name: str, kind: str):
    a, b = workshop.save("a", workshop.tensors()), workshop.save("b", workshop.tensors(1))
    path = Path(a) / name
    path.unlink(missing_ok=True)
    os.mkfifo(path) if kind == "fifo" else path.mkdir()
    config = {"method": "linear", "models": [a, b], "vocab": "union" if name == "tokenizer.json" else None}
    said = refusal({key: value for key, value in config.items() if value}, workshop.root / "out")
    assert said.startswith(f"{path} is not a regular file")


def test_a_fifo_or_a_socket_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.chdir(tmp_path)  # a socket's path has at most 107 characters
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    for name in ("fifo", "socket"):
        for read in (OpenFile, read_json):
            with raises_error("not_a_regular_file"):
                read(tmp_path / name)


def test_patterns_of_tensors_that_all_models_have(workshop: Any):
    tensors = workshop.tensors()
    a, b = workshop.save("a", tensors), workshop.save("b", tensors | HEADED)
    for pattern, named in {"*": "", "model.layers.0.*": "model.layers.0.", "*head*": "lm_head."}.items():
        values = {"method": "linear", "models": [a, b], "ignore": ["v_head.*", pattern]}
        said = refusal(values, workshop.root / "out")
        assert f"{pattern!r} fits tensor {named}" in said and "which all models have" in said
    states = {"a": {"w": torch.ones(2)}, "b": {"w": torch.ones(2)}}
    merger = ModelMerger({"method": "linear", "models": ["a", "b"], "ignore": ["w"]})
    with raises_error("ignored_common_tensor", tensor="w"):
        merger.merge_state_dicts(states)


def test_a_pattern_that_no_tensor_fits(workshop: Any):
    models = [workshop.save(name, workshop.tensors() | HEADED) for name in "ab"]
    said = refusal({"method": "linear", "models": models, "ignore": ["vhead.*"]}, workshop.root / "out")
    assert "no tensor of the models fits 'vhead.*'" in said


def test_a_greedy_soup_of_some_of_the_models_ignores_what_its_members_lack(workshop: Any):
    """The pattern fits tensors of all models of one soup, and of none of another."""
    tensors = workshop.tensors()
    scores = {}
    for name, extra, score in (("a", {}, 1), ("b", {}, 2), ("c", HEADED, 4), ("d", HEADED, 3)):
        scores[workshop.save(name, tensors | extra)] = score
    soup = ModelSoup(list(scores), {"ignore": ["v_head.*"]})
    seen = []

    def evaluate(folder: Path) -> float:
        if str(folder) in scores:
            return scores[str(folder)]
        seen.append("v_head.summary.weight" in workshop.load(folder))
        return 5 if len(seen) == 1 else 0

    result = soup.greedy(workshop.root / "out", evaluate)
    # c and d, then b and a in turn beside them, which have no such head.
    assert [Path(member).name for member in result.members] == ["c", "d"]
    assert seen == [True, False, False]
    again = ModelMerger(workshop.root / "out" / "merge_config.yaml").merge(workshop.root / "again")
    assert "v_head.summary.weight" in workshop.load(again.folder)


def test_a_message_shortens_what_a_file_holds(workshop: Any):
    a, b = workshop.save("a", workshop.tensors()), workshop.save("b", workshop.tensors(1))
    index = Path(a) / "model.safetensors.index.json"
    (Path(a) / "model.safetensors").unlink()
    index.write_text(json.dumps({"weight_map": {"n" * 100_000: "../" + "f" * 100_000}}))
    said = refusal({"method": "linear", "models": [a, b]}, workshop.root / "out")
    assert len(said) < len(a) + 350 and said.startswith(str(index)) and said.endswith("beside the index.")
    # A message that quotes nothing keeps its begin and its end.
    bare = str(MergeError(f"tensor {'n' * 100_000} is missing; get it"))
    assert len(bare) <= 2001 and bare.startswith("tensor nnn") and bare.endswith("nnn is missing; get it")
    apart = "'v_head.*' fits what models' files hold" + " and so on" * 12 + " as 'x' says"
    assert str(MergeError(apart)) == apart


def test_an_output_folder_inside_of_a_models(workshop: Any):
    a, b = workshop.save("a", workshop.tensors()), workshop.save("b", workshop.tensors(1))
    values = {"method": "linear", "models": [a, b]}
    for out in (Path(a) / "merged", Path(b) / "deep" / "merged", Path(a) / ".." / "b" / "merged"):
        assert "is inside of" in refusal(values, out)
        with raises_error("output_inside_model"):
            ModelSoup([a, b]).greedy(out, lambda folder: 1.0)
    assert sorted(os.listdir(a)) == sorted(os.listdir(b)) == ["config.json", "model.safetensors"]
    ModelMerger(values).merge(workshop.root / "a2")


def test_a_dry_run_refuses_an_output_folder_inside_of_a_models(workshop: Any):
    from click.testing import CliRunner

    from rlhf_merge.cli.main import main

    a, b = workshop.save("a", workshop.tensors()), workshop.save("b", workshop.tensors(1))
    ran = CliRunner().invoke(main, ["linear", f"{a}/out", "--model", a, "--model", b, "--dry-run"])
    assert ran.exit_code == 2 and "is inside of" in ran.output
