"""`rlhf-report lm-eval`: lm-eval's command line with our model and tasks."""

from __future__ import annotations

import click

from rlhf_report.options import explained


@click.command(
    "lm-eval",
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
    },
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@explained
def command(arguments: tuple[str, ...]) -> None:
    """Run lm-eval on our engine: --model rlhf --model_args pretrained=MODEL.

    All arguments are lm-eval's own (`rlhf-report lm-eval run --help`); the tasks rlhf_stories, rlhf_sums and
    rlhf_adversarial are added to its own.
    """
    from rlhf_data import UserError

    try:
        from rlhf_eval.harness.lm_eval_run import run
    except ImportError as error:
        raise UserError(
            f'lm-eval is not installed ({error}); run pip install "rlhf-report[harness]"',
            code="missing_package",
        ) from error
    run(arguments)
