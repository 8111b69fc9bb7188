"""The command line, in process, on tiny models."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import yaml
from click.testing import CliRunner, Result

from rlhf_merge.cli.main import main
from rlhf_merge.config.merge_config import MergeConfig
from rlhf_merge.methods.catalog import METHODS, PARAMETERS
from rlhf_merge.run.merger import ModelMerger

QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(autouse=True)
def same_signals() -> Iterator[None]:
    """The command handles SIGTERM; the tests' own process must not."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def run(*arguments: Any) -> Result:
    """A command that must succeed."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments: Any) -> str:
    """A command that must fail with one sentence; the sentence."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2 and result.stdout == ""
    error = result.stderr.strip().splitlines()
    before = [line for line in error[:-1] if line.strip() and "━" not in line]  # a bar, perhaps
    assert all(line.startswith(("Usage:", "Try ")) for line in before), result.stderr
    assert error[-1].startswith("Error: ")
    return error[-1].removeprefix("Error: ")


def options_of(method: str, paths: tuple[str, str, str]) -> list[str]:
    """The models of a method's command."""
    base, a, b = paths
    needed = ["--base", base] if METHODS[method].base == "required" else []
    several = METHODS[method].models != (1, 1)
    return [*needed, "--model", a, *(["--model", b] if several else [])]


def test_help_of_every_command():
    listed = run("--help").stdout
    for name in main.commands:
        assert f"  {name} " in listed
        text = " ".join(run(name, "--help").stdout.split())
        assert text == " ".join(run(name, "-h").stdout.split())
    assert run("--version").stdout.endswith(f", version {version('rlhf-merge')}\n")


@pytest.mark.parametrize("method", METHODS)
def test_help_of_a_method_names_its_parameters(method: str):
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


def test_only_click_is_loaded_for_help():
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
    for arguments in (["--help"], ["ties", "--help"], ["--version"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert done.returncode == 0 and done.stderr.strip() == "[]", done.stderr


SETTINGS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "linear": (["--normalize", "false"], {"normalize": False}),
    "task_arithmetic": (["--lambda", "0.5,1.5"], {"lambda": [0.5, 1.5]}),
    "ties": (
        ["--density", "mlp=0.3", "--density", "0.2,0.8", "--sign", "count", "--lambda", "-1"],
        {"density": {"mlp": 0.3, "*": [0.2, 0.8]}, "sign": "count", "lambda": -1},
    ),
    "dare_linear": (
        ["--density", "0.5", "--rescale", "mlp=false", "--seed", "3"],
        {"density": 0.5, "rescale": {"mlp": False}, "seed": 3},
    ),
    "dare_ties": (["--density=*=0.5", "--normalize", "true"], {"density": 0.5, "normalize": True}),
    "della": (
        ["--density", "0.5", "--epsilon", "0.1,0.3", "--seed", "9"],
        {"density": 0.5, "epsilon": [0.1, 0.3], "seed": 9},
    ),
    "della_linear": (["--density", "0.5", "--rescale", "false"], {"density": 0.5, "rescale": False}),
    "breadcrumbs": (
        ["--density", "0.5", "--gamma", "self_attn=0.2", "--gamma", "0"],
        {"density": 0.5, "gamma": {"self_attn": 0.2, "*": 0}},
    ),
    "breadcrumbs_ties": (
        ["--density", "0.5", "--sign", "count,mass"],
        {"density": 0.5, "sign": ["count", "mass"]},
    ),
    "slerp": (["--t", "self_attn=0,0.5,1", "--t", "0.3"], {"t": {"self_attn": [0, 0.5, 1], "*": 0.3}}),
    "karcher": (["--max-iter", "2", "--tol", "1e-3"], {"max_iter": 2, "tol": 1e-3}),
    "model_stock": (["--dtype", "float16"], {"dtype": "float16"}),
    "nearswap": (["--t", "1e-2"], {"t": 0.01}),
    "passthrough": (["--dtype", "float64"], {"dtype": "float64"}),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_merges_as_its_config_does(workshop: Any, method: str):
    base, a, b = paths = workshop.trio()
    options, values = SETTINGS[method]
    if method in ("linear", "ties"):
        models, listed = (
            ["--model", f"{a}:0.25", "--model", f"{b}:-2"],
            [{"model": a, "weight": 0.25}, {"model": b, "weight": -2.0}],
        )
        needed = ["--base", base]
    else:
        models, needed = options_of(method, paths), []
        listed = [a, b] if METHODS[method].models != (1, 1) else [a]
    config: dict[str, Any] = {"method": method, "models": listed, **values}
    if "--base" in [*models, *needed]:
        config["base"] = base
    out = workshop.root / "out"
    run(method.replace("_", "-"), *needed, *models, *options, out)
    (workshop.root / "config.yaml").write_text(yaml.safe_dump(config))
    run("run", workshop.root / "config.yaml", workshop.root / "same")
    ours, same = workshop.files(out), workshop.files(workshop.root / "same")
    assert ours["model.safetensors"] == same["model.safetensors"]
    assert yaml.safe_load(ours["merge_config.yaml"]) == yaml.safe_load(same["merge_config.yaml"])
    assert any(not torch.equal(t, workshop.load(a)[name]) for name, t in workshop.load(out).items()) or (
        method == "passthrough"
    )


def test_what_a_merge_prints(workshop: Any):
    base, a, b = workshop.trio()
    done = run("linear", "--model", f"{a}:1", "--model", f"{b}:3", workshop.root / "out", "--threads", "1")
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    tensors = workshop.tensors()
    size = sum(tensor.numel() for tensor in tensors.values()) * 4
    assert lines[-2:] == [
        "effective weights: a 0.25, b 0.75",
        f"{len(tensors)} tensors, {size / 1000:.3g} kB: {workshop.root / 'out'}",
    ]
    over_depth = run("task-arithmetic", "--base", base, "--model", a, "--lambda", "0,1", workshop.root / "o2")
    assert "effective weights: a 0." in over_depth.stderr and "(0 to 1)" in over_depth.stderr
    quiet = run("linear", "--model", a, "--model", b, workshop.root / "quiet", "--quiet")
    assert quiet.output == "" and (workshop.root / "quiet" / "config.json").exists()


def test_a_dry_run_shows_the_plan_and_writes_nothing(workshop: Any):
    base, a, b = workshop.trio(torch.bfloat16)
    command = ["ties", "--base", base, "--model", a, "--model", b, "--density", "0.5"]
    out = workshop.root / "new" / "out"
    before = workshop.files(workshop.root)
    shown = run(*command, out, "--dry-run").stdout
    assert "density: 0.5" in shown and "TIES" in shown and "bfloat16" in shown
    assert "in 1 file, " in shown and f"tokenizer of {base}" in " ".join(shown.split())
    assert run(*command, out, "--dry-run", "--quiet").output == ""
    assert refused(*command[:-1], "2", out, "--dry-run")
    assert workshop.files(workshop.root) == before and not out.parent.exists()


def test_plan(workshop: Any):
    base, a, b = workshop.trio(torch.bfloat16)
    values = {"method": "ties", "base": base, "models": [a, b], "density": 0.5}
    file = workshop.root / "config.json"
    file.write_text(json.dumps(values))
    before = workshop.files(workshop.root)
    shown = json.loads(run("plan", file, "--json", "--threads", "3").stdout)
    assert set(shown) == {
        *("config", "models", "bytes_read", "bytes_written", "parameters", "files"),
        *("threads", "memory", "tokenizer"),
    }
    plan = ModelMerger(values).plan()
    plan.close()
    assert shown["config"] == values and shown["models"] == dict.fromkeys([base, a, b], len(plan.jobs))
    assert shown["bytes_read"] == plan.bytes_read and shown["bytes_written"] == plan.bytes_written
    assert shown["parameters"] == plan.parameters and shown["tokenizer"] == base
    assert shown["files"] == {"model.safetensors": plan.shards[0].size} and shown["threads"] == 3
    assert shown["memory"] > 3 * plan.bytes_per_thread
    text = run("plan", file, "--threads", "3").stdout
    assert "reads " in text and "with 3 threads" in text and f"{plan.parameters:,} parameters" in text
    assert "--max-memory allows 1 MB" in refused("plan", file, "--max-memory", "1MB")
    assert workshop.files(workshop.root) == before


@pytest.mark.parametrize(
    ("text", "size"),
    [("500MB", 5 * 10**8), ("2G", 2 * 10**9), ("1.5kb", 1500), ("7", 7), (" 3 TB", 3 * 10**12), ("9B", 9)],
)
def test_sizes(text: str, size: int):
    from rlhf_merge.cli.main import Size

    assert Size().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "B", "GB", "x", "-1GB", "0", "nan", "infG", "1PB", "1e30", "2 G B 3"])
def test_what_is_no_size(text: str):
    from rlhf_merge.cli.main import Size

    with pytest.raises(
        click.BadParameter, match=r"is not a size; give a number|is out of range; give a size"
    ):
        Size().convert(text, None, None)


def test_mistakes_are_one_sentence_and_leave_nothing(workshop: Any):
    base, a, b = workshop.trio()
    out, before = workshop.root / "out", workshop.files(workshop.root)
    one, two = ["--model", a], ["--model", a, "--model", b]
    cases: list[tuple[list[Any], str]] = [
        (["ties", *one, out], "Missing option '--base'"),
        (["ties", "--base", base, out], "Missing option '--model'"),
        (["ties", "--base", base, *one], "Missing argument 'OUT'"),
        (["ties", "--base", base, *one, out, "--densty", "0.5"], "No such option"),
        (["ties", "--base", base, *one, "--density", "1.5", out], "density is 1.5, expected a finite number"),
        (["ties", "--base", base, *one, "--density", "0", out], "density is 0, expected"),
        (["ties", "--base", base, *one, "--density", "0.5,", out], "density[1] is None, expected"),
        (["ties", "--base", base, *one, "--density", "[", out], "density is '[', expected"),
        (["ties", "--base", base, *one, "--density", "=0.5", out], "has no word before the =; write WORD="),
        (["ties", "--base", base, *one, "--density", "0.5", "--density", "mlp=1", out], "never applies"),
        (["ties", "--base", base, *one, "--sign", "vote", out], "sign is 'vote', expected mass or count"),
        (["ties", "--base", base, *one, "--normalize", "maybe", out], "expected true or false"),
        (["ties", "--base", base, "--model", f"{a}:0", out], "sum to zero"),
        (["ties", "--base", base, "--model", f"{a}:nan", out], "weight is nan, expected a finite number"),
        (["ties", "--base", a, *one, out], f"is the base {a}"),
        (["linear", "--model", f"{a}:1", "--model", f"{b}:-1", out], "sum to zero"),
        (["linear", *two, "--dtype", "int8", out], "dtype"),
        (["linear", *two, "--vocab", "unoin", out], "vocab"),
        (["slerp", *one, out], "models holds 1, but slerp merges 2 models; add some"),
        (["slerp", *two, "--model", base, out], "models holds 3, but slerp merges 2 models"),
        (["model-stock", "--base", base, *one, out], "models holds 1, but model_stock merges at least 2"),
        (["nearswap", "--base", base, *two, out], "models holds 2, but nearswap merges 1"),
        (["della", "--base", base, *one, "--density", "0.1", out], "make epsilon smaller or density 1"),
        (["linear", *two, "--threads", "0", out], "Invalid value for '--threads'"),
        (["linear", *two, "--max-memory", "1QB", out], "'1QB' is not a size"),
        (["linear", *two, "--max-memory", "2MB", out], "--max-memory allows 2 MB"),
        (["linear", *two, "--seed", "-1", out], "Invalid value for '--seed'"),
        (["linear", *one, "--model", workshop.root / "none", out], "is not a folder here"),
        (["linear", *one, "--model", "org/model", out], "org/model is neither a folder here nor"),
        (["linear", *one, "--model", f"{a}+", out], "has an empty part"),
        (["linear", *two, a], "is not empty; choose a new one"),
        (["linear", *two, Path(a) / "config.json"], "is a file; a folder is written"),
        (["run", workshop.root / "none.yaml", out], "none.yaml"),
        (["run", Path(a) / "config.json", out], "neither is there"),
        (["plan", workshop.root / "none.yaml"], "none.yaml"),
        (["soup", *one, out], "a soup needs at least two models, got 1"),
        (["soup", *two, "--lower-is-better", out], "--lower-is-better is about the number of --evaluate"),
        (["soup", *two, "--evaluate", "echo 1", out], "has no {model}"),
        (["soup", *two, "--evaluate", "false {model}", out], "ended with 1 and said: nothing"),
        (["inspect", workshop.root / "none"], "is not a folder here"),
        (["diff", a], "diff compares models and got one"),
    ]
    for arguments, message in cases:
        assert message in refused(*arguments), arguments
        assert workshop.files(workshop.root) == before and not out.exists(), arguments


def test_soups(workshop: Any):
    base, a, b = workshop.trio()
    models = ["--model", base, "--model", a, "--model", b]
    done = run("soup", *models, workshop.root / "uniform")
    assert "uniform soup of 3 models:" in done.stderr and done.stdout == ""
    config = MergeConfig.from_dict({"method": "linear", "models": [base, a, b]})
    expected = ModelMerger(config).merge(workshop.root / "expected").folder
    assert workshop.files(workshop.root / "uniform") == workshop.files(expected)
    # The score of a folder is the length of its path, which is the same for all soups and longer than that of
    # a model.
    command = "printf %s {model} | wc -c"
    greedy = run("soup", *models, "--evaluate", command, workshop.root / "greedy").stderr.splitlines()
    assert len([line for line in greedy if "not worse, kept" in line]) == 2
    assert any(line.startswith("greedy soup of 3 of 3 models, ") for line in greedy)
    lower = run("soup", *models, "--evaluate", command, workshop.root / "lower", "--lower-is-better")
    assert lower.stderr.count("worse, left out") == 2 and "greedy soup of 1 of 3 models" in lower.stderr
    quiet = run("soup", *models, "--evaluate", command, workshop.root / "quiet", "--quiet", "--restart")
    assert quiet.output == ""
    assert torch.equal(workshop.load(workshop.root / "lower")[QUERY], workshop.load(a)[QUERY])


def test_inspect_and_diff(workshop: Any):
    base, a, b = workshop.trio()
    assert "layer" in run("inspect", base).stdout
    assert "lm_head.weight" in run("inspect", base, "--by", "tensor").stdout
    assert json.loads(run("inspect", base, "--json").stdout)
    assert "layer" in run("diff", base, a, b).stdout
    assert json.loads(run("diff", a, b, "--base", base, "--density", "0.5", "--json").stdout)
    narrow = CliRunner().invoke(main, ["diff", str(base), str(a), str(b)], env={"COLUMNS": "30"}).stdout
    wide = run("diff", base, a, b).stdout
    assert narrow.split() == wide.split() and "…" not in narrow  # no number loses its end
    image = workshop.root / "map.png"
    run("diff", base, a, b, "--png", image)
    assert image.read_bytes().startswith(b"\x89PNG")


def test_a_result_loads_in_transformers_and_generates(workshop: Any):
    import transformers

    base, a, b = workshop.trio()
    command = ["ties", "--base", base, "--model", f"{a}:0.6", "--model", f"{b}:0.4", "--density", "0.5"]
    run(*command, workshop.root / "out", "--max-shard-size", "3KB")
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        workshop.root / "out", output_loading_info=True
    )
    model, details = loaded
    assert not any(details[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    found = workshop.load(workshop.root / "out")
    assert torch.equal(model.state_dict()[QUERY], found[QUERY])
    generated = model.generate(
        torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False, eos_token_id=None
    )
    assert generated.shape == (1, 7)
