"""`rlhf-report evaluate`: what models write, what it is worth, and how far they are from their reference."""

from __future__ import annotations

from typing import Any

import click

from rlhf_report.failures import explained
from rlhf_report.options import bad_row_option


@click.command("evaluate")
@click.option(
    "--model",
    "models",
    multiple=True,
    required=True,
    metavar="[NAME=]MODEL",
    help="Model, run folder or adapter, or a file of completions; may be repeated.",
)
@click.option("--reference", metavar="[NAME=]MODEL", help="What they are compared with: often their start.")
@click.option(
    "--prompts", required=True, metavar="FILE", help="Prompts, or pairs and conversations with some."
)
@click.option(
    "--reward-model", metavar="MODEL", help="Reward of completions, as rlhf-train --reward takes it."
)
@click.option("--held-out-reward", metavar="MODEL", help="Another one, that nothing was trained on.")
@click.option(
    "--judge",
    "judges",
    multiple=True,
    metavar="JUDGE",
    help="judge:path=MODEL, judge:url=URL,model=NAME, openai, or any reward; may be repeated.",
)
@click.option("--judge-labels", metavar="FILE", help="Pairs that people ranked, to correct what judges say.")
@click.option("--pairs", metavar="FILE", help="Pairs for the accuracy of rewards, also of policies' own.")
@click.option("--adversarial", is_flag=True, help="Also the built-in prompts that provoke failures.")
@click.option("--num-prompts", default=200, show_default=True, type=click.IntRange(2), help="At most.")
@click.option("--winrate-prompts", default=120, show_default=True, type=click.IntRange(2), help="For judges.")
@click.option("--samples", default=1, show_default=True, type=click.IntRange(1), help="Completions a prompt.")
@click.option("--max-new-tokens", default=256, show_default=True, type=click.IntRange(1), help="Of each.")
@click.option("--temperature", default=1.0, show_default=True, type=click.FloatRange(0), help="0 is greedy.")
@click.option("--seed", default=0, show_default=True, type=int, help="Of sampling.")
@click.option(
    "--gen-batch-size", default=16, show_default=True, type=click.IntRange(1), help="Prompts at a time."
)
@click.option(
    "--backend",
    default="transformers",
    show_default=True,
    type=click.Choice(["transformers", "vllm"]),
    help="What draws the completions here.",
)
@click.option(
    "--vllm-server",
    "vllm_servers",
    multiple=True,
    metavar="[NAME=]URL",
    help="vLLM server that runs and serves a model, and draws its completions; may be repeated.",
)
@click.option(
    "--vllm-gpu-memory-utilization",
    type=click.FloatRange(0, 1, min_open=True),
    help="With --backend vllm: share of the device's memory.  [default: 0.3]",
)
@click.option("--dtype", default="auto", show_default=True, help="Of the models' weights.")
@click.option("--kl/--no-kl", default=True, show_default=True, help="Measure the KL to the reference.")
@click.option("--env-file", metavar="FILE", help="NAME=value lines for the environment, such as API keys.")
@bad_row_option("What to do with a row that cannot be read.")
@click.option("--output-dir", metavar="DIR", help="Folder of the report; one that was interrupted goes on.")
@explained
def command(**options: Any) -> None:
    """Let models write, and say whether what they write is better than their reference's."""
    from rlhf_report.evaluate.run import run_evaluate

    click.echo(run_evaluate(options))
