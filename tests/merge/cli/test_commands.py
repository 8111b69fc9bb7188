"""What commands do and print, on tiny models."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from rlhf_merge.cli.main import main
from rlhf_merge.run.merger import ModelMerger

QUERY = "model.layers.1.self_attn.q_proj.weight"

Run = Callable[..., Result]
Refused = Callable[..., str]


def test_what_a_merge_prints(workshop: Any, run: Run) -> None:
    base, a, b = workshop.trio()
    done = run("linear", "--model", f"{a}:1", "--model", f"{b}:3", workshop.root / "out", "--threads", "1")
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    tensors = workshop.tensors()
    size = sum(tensor.numel() for tensor in tensors.values()) * 4
    assert lines[-2:] == [
        "effective weights: a 0.25, b 0.75",
        f"{len(tensors)} tensors, {size / 1000:.1f} kB: {workshop.root / 'out'}",
    ]
    over_depth = run("task-arithmetic", "--base", base, "--model", a, "--lambda", "0,1", workshop.root / "o2")
    assert "effective weights: a 0." in over_depth.stderr and "(0 to 1)" in over_depth.stderr
    headed = workshop.save("headed", tensors | {"v_head.w": torch.ones(1)})
    ignoring = run("linear", "--model", a, "--model", headed, "--ignore", "v_head.*", workshop.root / "o3")
    assert "left out: v_head.w" in ignoring.stderr
    quiet = run("linear", "--model", a, "--model", b, workshop.root / "quiet", "--quiet")
    assert quiet.output == "" and (workshop.root / "quiet" / "config.json").exists()


def test_a_merge_that_goes_on_says_so(workshop: Any, run: Run) -> None:
    base, a, _ = workshop.trio()
    path, out = workshop.root / "config.json", workshop.root / "out"
    path.write_text(json.dumps({"method": "linear", "models": [base, a]}))

    left = [8000]

    def stop(moved: int) -> None:
        left[0] -= moved
        if left[0] < 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ModelMerger(path).merge(out, on_bytes=stop)
    assert "tensors had been merged before" in run("run", path, out).stderr
    assert len(workshop.load(out)) == len(workshop.tensors())


def test_a_dry_run_shows_the_plan_and_writes_nothing(workshop: Any, run: Run, refused: Refused) -> None:
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
    longer = {k: torch.cat([t, t[:1]]) if t.shape == (16, 8) else t for k, t in workshop.load(a).items()}
    models = ["--model", a, "--model", workshop.save("longer", longer, vocab_size=17)]
    assert "--vocab truncate" in refused("linear", *models, out)
    shown = run("linear", *models, "--vocab", "truncate", out, "--dry-run").stdout
    assert "vocabulary: 16 rows, 0 tokens added" in shown


def test_plan(workshop: Any, run: Run, refused: Refused) -> None:
    base, a, b = workshop.trio(torch.bfloat16)
    headed = workshop.save("headed", workshop.load(b) | {"v_head.w": torch.ones(1)})
    values = {"method": "ties", "base": base, "models": [a, headed], "density": 0.5, "ignore": ["v_head.*"]}
    file = workshop.root / "config.json"
    file.write_text(json.dumps(values))
    before = workshop.files(workshop.root)
    shown = json.loads(run("plan", file, "--json", "--threads", "3").stdout)
    plan = ModelMerger(values).plan()
    plan.close()
    count = len(plan.jobs)
    assert shown.pop("memory") > 3 * plan.bytes_per_thread
    assert shown == {
        "config": values,
        "models": {base: count, a: count, headed: count + 1},
        "bytes_read": plan.bytes_read,
        "bytes_written": plan.bytes_written,
        "parameters": plan.parameters,
        "files": {"model.safetensors": plan.shards[0].size},
        "threads": 3,
        "tokenizer": base,
    }
    text = run("plan", file, "--threads", "3").stdout
    words = ("reads ", "with 3 threads", f"{plan.parameters:,} parameters", "leaves out v_head.w")
    assert all(word in text for word in words)
    assert "--max-memory allows 1 MB" in refused("plan", file, "--max-memory", "1MB")
    assert workshop.files(workshop.root) == before


def test_soups(workshop: Any, run: Run) -> None:
    base, a, b = workshop.trio()
    models = ["--model", base, "--model", a, "--model", b]
    done = run("soup", *models, workshop.root / "uniform")
    assert "uniform soup of 3 models:" in done.stderr and done.stdout == ""
    merger = ModelMerger({"method": "linear", "models": [base, a, b]})
    expected = merger.merge(workshop.root / "expected").folder
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


def test_inspect_and_diff(workshop: Any, run: Run) -> None:
    base, a, b = workshop.trio()
    assert "layer" in run("inspect", base).stdout
    assert "lm_head.weight" in run("inspect", base, "--by", "tensor").stdout
    assert json.loads(run("inspect", base, "--json").stdout)
    assert json.loads(run("diff", a, b, "--base", base, "--density", "0.5", "--json").stdout)
    narrow = CliRunner().invoke(main, ["diff", str(base), str(a), str(b)], env={"COLUMNS": "30"}).stdout
    wide = run("diff", base, a, b).stdout
    assert narrow.split() == wide.split() and "…" not in narrow  # no number loses its end
    image = workshop.root / "map.png"
    run("diff", base, a, b, "--png", image)
    assert image.read_bytes().startswith(b"\x89PNG")


def test_a_result_loads_in_transformers_and_generates(workshop: Any, run: Run) -> None:
    import transformers

    base, a, b = workshop.trio()
    command = ["ties", "--base", base, "--model", f"{a}:0.6", "--model", f"{b}:0.4", "--density", "0.5"]
    run(*command, workshop.root / "out", "--max-shard-size", "3KB")
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        workshop.root / "out", output_loading_info=True
    )
    model, details = loaded
    assert not any(details[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(model.state_dict()[QUERY], workshop.load(workshop.root / "out")[QUERY])
    ids = torch.tensor([[1, 2, 3]])
    generated = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert generated.shape == (1, 7)
