"""`rlhf-report minmax`: the report of a game, rewritten from its run folder."""

from __future__ import annotations

from pathlib import Path

import click

from rlhf_report.options import explained


@click.command("minmax")
@click.argument("run", metavar="RUN")
@click.option("--output-dir", metavar="DIR", help="Folder of the report.  [default: the run's folder]")
@explained
def command(run: str, output_dir: str | None) -> None:
    """Rewrite the page and the figure of a finished MinMax run from its files."""
    from rlhf_data import RunFolder, ensure_writable_folder
    from rlhf_minmax import minmax_figure, write_minmax_report
    from rlhf_minmax.report.page import run_metrics

    folder = RunFolder.open(run)
    place = folder.path if output_dir is None else ensure_writable_folder(Path(output_dir))
    write_minmax_report(folder, place / "report.html")
    minmax_figure(run_metrics(folder), folder.read_results() or {}, place / "minmax.png")
    click.echo(f"{place / 'report.html'}")
