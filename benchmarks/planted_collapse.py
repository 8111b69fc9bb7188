"""Self-rewarding with a judge that loves length: without gates the policy collapses, with them it stops.

A tiny model learns to answer stories.  Then rounds of self-rewarding (Yuan et al. 2024, arXiv:2401.10020)
train it by DPO on pairs of its own completions that a judge ranks, here one that scores a completion by its
number of words.  One loop promotes whatever comes out; the other promotes a policy only if gates, which do
not ask the judge, show that it still answers right and still ends its answers.  Everything else is the same,
and what both loops share is computed once.  Stages are those of `rlhf-train pipeline`; to save the start of
a process each is forked from this one, which has loaded torch already.  Prints JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from rlhf_algos.pipeline import Pipeline, PipelineConfig
from rlhf_algos.pipeline.kinds import KINDS
from rlhf_algos.pipeline.launch import LOG

ROUNDS, ROWS = 3, 64
_PRELOADED = (
    *(
        "rlhf_algos.jobs.training_job",
        "rlhf_algos.offline.sft",
        "rlhf_algos.offline.dpo",
        "rlhf_infer",
        "rlhf_eval",
    ),
    *(
        "transformers.models.llama.modeling_llama",
        "peft",
        "rlhf_report.cli",
        "rlhf_serve.cli",
        "rlhf_train.cli",
    ),
)


def loves_length(completions: list[str], **_: Any) -> list[float]:
    """The planted judge: the number of words."""
    return [float(len(text.split())) for text in completions]


def stages(gated: bool) -> dict[str, Any]:
    """The loop, with gates or without."""

    def measured(model: str) -> dict[str, Any]:
        prompts = {
            "prompts": "${data.prompts}",
            "reward_model": "choice",
            "max_new_tokens": 24,
            "temperature": 0,
        }
        return {"kind": "evaluate", "config": {"model": model, **prompts}}

    draw = {
        "model": "${current.policy}",
        "prompts": "${data.prompts}",
        "reward": "planted_collapse:loves_length",
    }
    draw |= {"n": 8, "keep": 8, "temperature": 1.5, "max_tokens": 24, "sampling_seed": "${round}"}
    train = {"model_name_or_path": "${current.policy}", "train_data": "${pairs.rows}", "learning_rate": 1e-3}
    train |= {"num_train_epochs": 4, "ref_kl_rows": 0, "stage_samples": 0}
    gate = {
        "config": {"candidate": "${train.final}", "measured": "${after.report}", "start": "${start.report}"},
        "gates": [
            {"metric": "reward", "against": "previous", "margin": 0.1},
            {"metric": "truncated", "op": "<", "threshold": 0.2},
        ],
        "promotes": "policy",
    }
    sft = {"train_data": "${data.sft}", "eval_fraction": 0, "num_train_epochs": 40, "ref_kl_rows": 0}
    return {
        "data": {"config": {"rows": ROWS}},
        "sft": {"config": {**sft, "stage_samples": 0}, "promotes": "policy"},
        "start": measured("${sft.final}"),
        "self": {
            "rounds": ROUNDS,
            "stages": {
                "draw": {"kind": "generate", "config": draw},
                "pairs": {"kind": "filter", "config": {"rows": "${draw.rows}", "to": "pairs"}},
                "train": {"kind": "dpo", "config": train, **({} if gated else {"promotes": "policy"})},
                "after": measured("${train.final}"),
                **({"gate": gate} if gated else {}),
            },
        },
    }


def forked(stage: Any, settings: dict[str, Any], folder: Path) -> int:
    """Run a stage's command in a fork of this process; its exit code."""
    module, arguments = KINDS[stage.kind].command(folder, settings)
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        with open(folder / LOG, "a", encoding="utf-8") as log:
            for number in (1, 2):
                os.dup2(log.fileno(), number)
            sys.argv = [module, *arguments]
            try:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
            except BaseException:
                traceback.print_exc()
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
    finally:
        os._exit(code)


def run(root: Path, seed: int, gated: bool) -> dict[str, Any]:
    """One loop; what the policy was at first, after each round, and what became of it."""
    config = PipelineConfig.from_dict({"seed": seed, "stages": stages(gated)})
    pipeline = Pipeline(config, root, launch=forked)
    found = pipeline.run()["stages"]
    rounds = []
    for number in range(1, ROUNDS + 1):
        entries = {name: found[f"self-{number}-{name}"] for name in stages(gated)["self"]["stages"]}
        if entries["after"]["status"] != "done":
            break
        rounds.append(
            {
                **_measures(root / entries["after"]["folder"]),
                "alarms": entries["draw"].get("alarms", []) + entries["after"].get("alarms", []),
                **({"decision": entries["gate"]["decision"]} if gated else {}),
                **({"reasons": entries["gate"]["metrics"]["reasons"]} if gated else {}),
            }
        )
    start = _measures(root / found["start"]["folder"])
    kept = [each for each in rounds if each.get("decision", "accepted") == "accepted"]
    return {"start": start, "rounds": rounds, "end": kept[-1] if kept else start}


def _measures(folder: Path) -> dict[str, float]:
    """Share of right answers, share that does not end, mean number of words; of greedy answers."""
    lines = (folder / "report/completions/policy.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {
        "right": sum(row["reward"] for row in rows) / len(rows),
        "cut_off": sum(row["finish_reason"] == "length" for row in rows) / len(rows),
        "words": sum(len(row["completion"].split()) for row in rows) / len(rows),
    }


def main() -> None:
    """Run every seed and write what came out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, help="file for the results; they are printed too")
    parser.add_argument("--work", type=Path, help="folder for the pipelines; by default a temporary one")
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))  # where a stage finds the judge
    for name in _PRELOADED:
        importlib.import_module(name)
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        for seed in given.seeds:
            root = (given.work or Path(temporary)) / str(seed)
            loops = {name: run(root, seed, gated) for name, gated in (("ungated", False), ("gated", True))}
            found.append({"seed": seed, **loops})
            for name, loop in loops.items():
                shown = "".join(f" -> {each['right']:.2f}" for each in loop["rounds"])
                print(f"seed {seed} {name}: {loop['start']['right']:.2f}{shown}", file=sys.stderr)
    text = json.dumps({"rounds": ROUNDS, "rows": ROWS, "seeds": found}, indent=1)
    if given.output:
        given.output.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
