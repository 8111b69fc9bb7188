"""The command line on models of every kind: adapters, pickles, hub ids, other vocabularies."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import save_file

from rlhf_merge.cli.main import main

QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(autouse=True)
def same_signals() -> Iterator[None]:
    """The command handles SIGTERM; the tests' own process must not."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def run(*arguments: Any, code: int = 0) -> str:
    """What a command says."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.stderr


def refused(*arguments: Any) -> str:
    """What a command says that must fail."""
    said = run(*arguments, code=2)
    assert said.splitlines()[-1].startswith("Error: ")
    return said


def test_adapters_behind_a_plus(workshop: Any):
    base = workshop.tensors()
    path, folder = workshop.save("base", base), workshop.root / "adapter"
    folder.mkdir()
    down, up = torch.full((2, 8), 0.5), torch.arange(16.0).view(8, 2)
    key = f"base_model.model.{QUERY.removesuffix('.weight')}.lora_"
    save_file({f"{key}A.weight": down, f"{key}B.weight": up}, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    spec = f"{path}+{folder}"
    said = run("task-arithmetic", "--base", path, "--model", f"{spec}:0.5", workshop.root / "out")
    assert "effective weights: base+adapter 0.5" in said
    found = workshop.load(workshop.root / "out")
    # Half of B A, scaled by alpha/r = 3.
    assert torch.allclose(found.pop(QUERY), base[QUERY] + 0.5 * 3 * up @ down, atol=1e-6)
    assert all(torch.equal(tensor, base[name]) for name, tensor in found.items())
    recipe = yaml.safe_load((workshop.root / "out" / "merge_config.yaml").read_text())
    assert recipe["models"] == [{"model": spec, "weight": 0.5}]


def test_pickled_and_sharded_models(workshop: Any):
    base, a, _ = workshop.trio(torch.bfloat16)
    sharded = workshop.save("sharded", workshop.load(a), shards=3)
    pickled = workshop.root / "pickled"
    pickled.mkdir()
    torch.save(workshop.load(base), pickled / "pytorch_model.bin")
    (pickled / "config.json").write_bytes((Path(base) / "config.json").read_bytes())
    run("slerp", "--model", base, "--model", a, workshop.root / "one")
    run("slerp", "--model", pickled, "--model", sharded, workshop.root / "two")
    ours, other = (workshop.files(workshop.root / name) for name in ("one", "two"))
    assert ours["model.safetensors"] == other["model.safetensors"]
    assert ours["config.json"] == other["config.json"]


def test_weights_behind_the_last_colon(workshop: Any):
    tensors = workshop.tensors()
    names = ["a:b", "c:0.5", "d"]
    paths = [workshop.save(name, workshop.tuned(tensors, seed)) for seed, name in enumerate(names)]
    run("linear", "--model", paths[0], "--model", f"{paths[1]}:2", "--model", f"{paths[2]}:1e-1",
        workshop.root / "out")  # fmt: skip
    recipe = yaml.safe_load((workshop.root / "out" / "merge_config.yaml").read_text())
    assert recipe["models"] == [
        paths[0],
        {"model": paths[1], "weight": 2.0},
        {"model": paths[2], "weight": 0.1},
    ]


def test_vocab_and_shards(workshop: Any):
    tensors = workshop.tensors()
    longer = {k: torch.cat([t, t[:1] + 1]) if t.shape == (16, 8) else t for k, t in tensors.items()}
    a, b = workshop.save("a", tensors), workshop.save("b", longer, vocab_size=17)
    for path, texts in {a: ["<x>"], b: ["<x>", "<y>"]}.items():
        words = {chr(97 + i): i for i in range(15)}
        added = [
            {"id": 15 + i, "content": text, "special": True, "normalized": False, "lstrip": False}
            | {"rstrip": False, "single_word": False}
            for i, text in enumerate(texts)
        ]
        content = {"added_tokens": added, "model": {"type": "WordLevel", "vocab": words, "unk_token": "a"}}
        (Path(path) / "tokenizer.json").write_text(json.dumps(content))
    models = ["--model", a, "--model", b]
    assert "--vocab" in refused("linear", *models, workshop.root / "out")
    for how, rows in (("union", 17), ("truncate", 16)):
        out = workshop.root / how
        run("linear", *models, "--vocab", how, out, "--max-shard-size", "2KB")
        found = workshop.load(out)
        assert found["lm_head.weight"].shape == (rows, 8)
        assert json.loads((out / "config.json").read_text())["vocab_size"] == rows
        assert (out / "model.safetensors.index.json").exists()
        known = json.loads((out / "tokenizer.json").read_text())["added_tokens"]
        assert [token["content"] for token in known] == ["<x>", "<y>"][: rows - 15]
    # <y> has b's row; a has none.
    assert torch.equal(
        workshop.load(workshop.root / "union")["lm_head.weight"][16], longer["lm_head.weight"][16]
    )


def test_slerp_from_the_base_to_one_model(workshop: Any):
    """What mergekit calls base_model is where it starts."""
    base, a, _ = workshop.trio()
    out, same = workshop.root / "out", workshop.root / "same"
    run("slerp", "--base", base, "--model", a, "--t", "0.25", out)
    run("slerp", "--model", base, "--model", a, "--t", "0.25", same)
    assert (out / "model.safetensors").read_bytes() == (same / "model.safetensors").read_bytes()


def test_the_effective_weights_of_runs_name_the_runs(workshop: Any):
    state = workshop.tensors()
    models = [
        workshop.save(f"{name}/final", workshop.tuned(state, i)) for i, name in enumerate(("dpo", "sft"))
    ]
    said = run("linear", "--model", models[0], "--model", f"{models[1]}:3", workshop.root / "out")
    assert "effective weights: dpo/final 0.25, sft/final 0.75" in said
