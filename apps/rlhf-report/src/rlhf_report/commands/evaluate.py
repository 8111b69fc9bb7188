"""`rlhf-report evaluate`: completions of models, their rewards, and the divergence from the reference."""

from __future__ import annotations

from typing import Any

import click

from rlhf_report.options import bad_row_option, dtype_option, explained, max_new_tokens_option


@click.command("evaluate")
@click.option(
    "--model",
    "models",
    multiple=True,
    required=True,
    metavar="[NAME=]MODEL",
    help="Model, run folder, adapter, or file of completions; repeatable.",
)
@click.option("--reference", metavar="[NAME=]MODEL", help="Model to compare with, often the starting model.")
@click.option("--prompts", required=True, metavar="FILE", help="Prompts; also pairs or conversations.")
@click.option("--reward-model", metavar="MODEL", help="Reward of completions, as in rlhf-train --reward.")
@click.option("--held-out-reward", metavar="MODEL", help="A reward that no model was trained on.")
@click.option(
    "--judge",
    "judges",
    multiple=True,
    metavar="JUDGE",
    help="judge:path=MODEL, judge:url=URL,model=NAME, openai, or any reward; repeatable.",
)
@click.option(
    "--judge-labels", metavar="FILE", help="Pairs ranked by people, to correct the judges' win rates."
)
@click.option(
    "--pairs", metavar="FILE", help="Preference pairs, to measure accuracy of rewards and implicit rewards."
)
@click.option("--adversarial", is_flag=True, help="Also use the built-in adversarial prompts.")
@click.option(
    "--num-prompts", default=200, show_default=True, type=click.IntRange(2), help="Maximum number of prompts."
)
@click.option(
    "--winrate-prompts",
    default=120,
    show_default=True,
    type=click.IntRange(2),
    help="Maximum number of prompts for judges.",
)
@click.option(
    "--samples", default=1, show_default=True, type=click.IntRange(1), help="Completions per prompt."
)
@max_new_tokens_option(256, "a completion")
@click.option("--temperature", default=1.0, show_default=True, type=click.FloatRange(0), help="0 is greedy.")
@click.option("--seed", default=0, show_default=True, type=int, help="Seed of the sampling.")
@click.option(
    "--gen-batch-size", default=16, show_default=True, type=click.IntRange(1), help="Prompts per batch."
)
@click.option(
    "--backend",
    default="transformers",
    show_default=True,
    type=click.Choice(["transformers", "vllm"]),
    help="Engine for models on this machine.",
)
@click.option(
    "--vllm-server",
    "vllm_servers",
    multiple=True,
    metavar="[NAME=]URL",
    help="Running vLLM server of a model; repeatable.",
)
@click.option(
    "--vllm-gpu-memory-utilization",
    type=click.FloatRange(0, 1, min_open=True),
    help="With --backend vllm: share of the device's memory.  [default: 0.3]",
)
@dtype_option("the models'")
@click.option("--kl/--no-kl", default=True, show_default=True, help="Measure the KL to the reference.")
@click.option("--env-file", metavar="FILE", help="NAME=value lines for the environment, such as API keys.")
@bad_row_option("What to do with a row that cannot be read.")
@click.option(
    "--output-dir", metavar="DIR", help="Folder of the report; an interrupted evaluation continues."
)
@explained
def command(**options: Any) -> None:
    """Compare models' completions with a reference model's: rewards, win rates, KL, diversity."""
    from rlhf_report.evaluate.run import run_evaluate

    click.echo(run_evaluate(options))
