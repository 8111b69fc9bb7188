"""`rlhf-report attack`: how often a model's right answers become wrong as its prompts are changed."""

from __future__ import annotations

from typing import Any

import click

from rlhf_report.options import dtype_option, explained, max_new_tokens_option, report_dir_option


@click.command("attack")
@click.argument("model", metavar="MODEL")
@click.argument("data", metavar="DATA")
@click.option(
    "--transform",
    "transforms",
    multiple=True,
    metavar="NAME",
    help="typos, paraphrase, distractor, role_play, jailbreak, injection, suggestion, choice_order; "
    "repeatable.  [default: all]",
)
@click.option(
    "--reward", metavar="REWARD", help="Measures answers in place of the rows; as in rlhf-train --reward."
)
@click.option("--right-from", type=float, help="With --reward: an answer with at least this reward is right.")
@max_new_tokens_option(64, "an answer")
@click.option("--seed", default=0, show_default=True, type=int, help="Seed of the changes.")
@dtype_option()
@report_dir_option("attack")
@explained
def command(**options: Any) -> None:
    """Change prompts in ways that leave the right answer as it is, and count answers that become wrong.

    MODEL is a model, run folder or adapter. DATA has rows as `capability --file` reads them: a prompt with
    choices and answer, with answer, or with checks, such as {"refuses": true}; or it is the name of a
    built-in suite, such as refusals. With --reward any rows with prompts will do.
    """
    from rlhf_report.attack import run_attack

    run_attack(options)
