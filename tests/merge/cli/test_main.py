"""The command line: help, options, and mistakes in one sentence."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import yaml
from click.testing import Result

from rlhf_merge.cli.main import Size, main
from rlhf_merge.config.merge_config import MergeConfig
from rlhf_merge.methods.families import METHODS, PARAMETERS

Run = Callable[..., Result]
Refused = Callable[..., str]


def test_help_of_every_command(run: Run) -> None:
    listed = run("--help").stdout
    for name in main.commands:
        assert f"  {name} " in listed
        assert run(name, "--help").stdout == run(name, "-h").stdout
    assert run("--version").stdout.endswith(f", version {version('rlhf-merge')}\n")


@pytest.mark.parametrize("method", METHODS)
def test_help_of_a_method_names_its_parameters(run: Run, method: str) -> None:
    text = " ".join(run(method.replace("_", "-"), "--help").stdout.split())
    for name, default in METHODS[method].parameters.items():
        shown = str(default).lower() if isinstance(default, bool) else default
        if name == "weight":
            assert "MODEL:WEIGHT" in text
        else:
            assert f"--{name.replace('_', '-')} VALUE" in text and f"[default: {shown}]" in text
    for name in set(PARAMETERS) - set(METHODS[method].parameters):
        assert f"--{name.replace('_', '-')} VALUE" not in text
    assert METHODS[method].paper.split(":")[0] in text


@pytest.mark.parametrize("arguments", [["--help"], ["ties", "--help"], ["--version"]])
def test_only_click_is_loaded_for_help(arguments: list[str]) -> None:
    code = """
import sys
sys.argv = ["rlhf-merge", *sys.argv[1:]]
from rlhf_merge.cli.main import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
heavy = ("torch", "numpy", "pydantic", "yaml", "rich", "safetensors", "huggingface_hub", "transformers")
print([name for name in heavy if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.strip() == "[]", done.stderr


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("--normalize false", {"normalize": False}),
    "task_arithmetic": ("--lambda 0.5,1.5", {"lambda": [0.5, 1.5]}),
    "ties": (
        "--density mlp=0.3 --density 0.2,0.8 --sign count --lambda -1",
        {"density": {"mlp": 0.3, "*": [0.2, 0.8]}, "sign": "count", "lambda": -1},
    ),
    "dare_linear": (
        "--density 0.5 --rescale mlp=false --seed 3",
        {"density": 0.5, "rescale": {"mlp": False}, "seed": 3},
    ),
    "dare_ties": ("--density=*=0.5 --normalize true", {"density": 0.5, "normalize": True}),
    "della": ("--density 0.5 --epsilon 0.1,0.3 --seed 9", {"density": 0.5, "epsilon": [0.1, 0.3], "seed": 9}),
    "della_linear": ("--density 0.5 --rescale false", {"density": 0.5, "rescale": False}),
    "breadcrumbs": (
        "--density 0.5 --gamma self_attn=0.2 --gamma 0",
        {"density": 0.5, "gamma": {"self_attn": 0.2, "*": 0}},
    ),
    "breadcrumbs_ties": ("--density 0.5 --sign count,mass", {"density": 0.5, "sign": ["count", "mass"]}),
    "slerp": ("--t self_attn=0,0.5,1 --t 0.3", {"t": {"self_attn": [0, 0.5, 1], "*": 0.3}}),
    "karcher": ("--max-iter 2 --tol 1e-3", {"max_iter": 2, "tol": 1e-3}),
    "model_stock": ("--dtype float16 --vocab truncate", {"dtype": "float16", "vocab": "truncate"}),
    "nearswap": ("--t 1e-2", {"t": 0.01}),
    "passthrough": ("--dtype float64", {"dtype": "float64"}),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_merges_as_its_config_says(workshop: Any, run: Run, method: str) -> None:
    base, a, b = workshop.trio()
    assert method in SETTINGS, f"give {method} options and what a config says for them in SETTINGS"
    text, values = SETTINGS[method]
    listed: list[Any] = [a, b] if METHODS[method].models != (1, 1) else [a]
    models = list(listed)
    if method in ("linear", "ties"):
        models, listed = [f"{a}:0.25", f"{b}:-2"], [{"model": a, "weight": 0.25}, {"model": b, "weight": -2}]
    needed = {"base": base} if METHODS[method].base == "required" else {}
    options = [word for key, value in needed.items() for word in (f"--{key}", value)]
    options += [word for model in models for word in ("--model", model)]
    run(method.replace("_", "-"), *options, *text.split(), workshop.root / "out")
    recipe = yaml.safe_load((workshop.root / "out" / "merge_config.yaml").read_text())
    expected = MergeConfig.from_dict({"method": method, "models": listed} | needed | values)
    assert recipe == expected.to_dict()
    found, before = workshop.load(workshop.root / "out"), workshop.load(a)
    changed = any(not torch.equal(tensor, before[name]) for name, tensor in found.items())
    assert changed or method == "passthrough"


def test_weights_behind_the_last_colon(workshop: Any, run: Run) -> None:
    tensors = workshop.tensors()
    paths = [
        workshop.save(name, workshop.tuned(tensors, seed)) for seed, name in enumerate(["a:b", "c:0.5", "d"])
    ]
    options = ["--model", paths[0], "--model", f"{paths[1]}:2", "--model", f"{paths[2]}:1e-1"]
    run("linear", *options, workshop.root / "out")
    recipe = yaml.safe_load((workshop.root / "out" / "merge_config.yaml").read_text())
    weighted = [{"model": path, "weight": weight} for path, weight in zip(paths[1:], (2.0, 0.1), strict=True)]
    assert recipe["models"] == [paths[0], *weighted]


def test_slerp_from_the_base_to_one_model(workshop: Any, run: Run) -> None:
    """What mergekit calls base_model is where it starts."""
    base, a, _ = workshop.trio()
    out, same = workshop.root / "out", workshop.root / "same"
    run("slerp", "--base", base, "--model", a, "--t", "0.25", out)
    run("slerp", "--model", base, "--model", a, "--t", "0.25", same)
    assert (out / "model.safetensors").read_bytes() == (same / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("text", "size"),
    [("500MB", 5 * 10**8), ("2G", 2 * 10**9), ("1.5kb", 1500), ("7", 7), (" 3 TB", 3 * 10**12), ("9B", 9)],
)
def test_sizes(text: str, size: int) -> None:
    assert Size().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "B", "GB", "x", "-1GB", "0", "nan", "infG", "1PB", "1e30", "2 G B 3"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Size().convert(text, None, None)


def test_mistakes_are_one_sentence_and_leave_nothing(workshop: Any, refused: Refused) -> None:
    base, a, b = workshop.trio()
    names = {"BASE": base, "A": a, "B": b, "OUT": workshop.root / "out", "NONE": workshop.root / "none.yaml"}
    names |= {"CONFIG": Path(a) / "config.json", "INSIDE": Path(a) / "out"}
    before = workshop.files(workshop.root)
    for line in MISTAKES.strip().splitlines():
        command, message = line.split(" | ")
        words = []
        for word in command.split():
            name, colon, rest = word.partition(":")
            words.append(f"{names.get(name, name)}{colon}{rest}")
        assert message in refused(*words), line
        assert workshop.files(workshop.root) == before, line


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")])
def test_too_little_memory_is_a_sentence(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr("rlhf_merge.cli.commands.show_model", fail)
    assert refused("inspect", "model").startswith("there is not enough memory (")


MISTAKES = """
ties --model A OUT | Missing option '--base'
ties --base BASE OUT | Missing option '--model'
ties --base BASE --model A | Missing argument 'OUT'
ties --base BASE --model A OUT --densty 0.5 | No such option
ties --base BASE --model A --density 0.5, OUT | density[1] is None, expected
ties --base BASE --model A --density [ OUT | density is '[', expected
ties --base BASE --model A --density =0.5 OUT | has no word before the =; write WORD=
ties --base BASE --model A --density 0.5 --density mlp=1 OUT | never applies
ties --base BASE --model A:nan OUT | weight is nan, expected a finite number
linear --model A:1 --model B:-1 OUT | sum to zero
linear --model A --model B --dtype int8 OUT | dtype is 'int8'
slerp --model A OUT | models holds 1, but slerp merges 2
linear --model A --model B --threads 0 OUT | Invalid value for '--threads'
linear --model A --model B --max-memory 1QB OUT | '1QB' is not a size
linear --model A --model B --max-memory 2MB OUT | --max-memory allows 2 MB
linear --model A --model B --seed -1 OUT | Invalid value for '--seed'
linear --model A --model org/model OUT | org/model is neither a folder here nor
linear --model A --model B A | is not empty; choose a new one
linear --model A --model B CONFIG | is a file, and a folder is written
linear --model A --model B INSIDE --dry-run | is inside of
run NONE OUT | none.yaml
run CONFIG OUT | and has neither
plan NONE | none.yaml
soup --model A OUT | a soup needs at least two models, got 1
soup --model A --model B --lower-is-better OUT | --lower-is-better is about the number of --evaluate
soup --model A --model B --evaluate true OUT | has no {model}
inspect NONE | is not a folder here
diff A | diff compares models and got one
"""
