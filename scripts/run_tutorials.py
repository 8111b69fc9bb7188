"""Runs the tutorials, each in a temporary folder: python scripts/run_tutorials.py [--write] [NAME ...].

Fails on the first cell that does. With --write, the notebooks keep what their cells printed and drew.
"""

from __future__ import annotations

import argparse
import os
import re
import sysconfig
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials"
TIMEOUT_S = 900
"""Of one cell; a quiet machine needs less than a fifth of it."""


def run(path: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs that it has in an empty folder."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        client = NotebookClient(
            notebook,
            timeout=TIMEOUT_S,
            kernel_name="python3",
            extra_arguments=["--log-level=ERROR"],
            resources=resources,
            record_timing=False,
        )
        client.execute()
        places = [folder, str(FOLDER.parents[1]), str(Path.home())]
    named = [place for place in places if place in nbformat.writes(notebook)]
    if named:
        raise SystemExit(f"{path.name}: an output names {', '.join(named)}")
    return notebook


def save(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Writes a notebook without what differs between machines."""
    notebook.metadata.kernelspec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata.language_info = {"name": "python"}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
    path.write_text(nbformat.writes(notebook, indent=1) + "\n", encoding="utf-8")


def _joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Outputs in which what was printed in pieces is one text, without colours."""
    joined: list[nbformat.NotebookNode] = []
    for output in outputs:
        if joined and output.output_type == joined[-1].output_type == "stream":
            joined[-1].text += output.text
        else:
            joined.append(output)
    for output in joined:
        if output.output_type == "stream":
            output.name = "stdout"
            output.text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.text)
    return joined


def main() -> None:
    """Runs the named tutorials, by default all, and says how long each took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the outputs in the notebooks")
    parser.add_argument("names", nargs="*", help="such as first_game; all without one")
    options = parser.parse_args()
    paths = [FOLDER / f"{name}.ipynb" for name in options.names] or sorted(FOLDER.glob("*.ipynb"))
    os.environ["PATH"] = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]
    for path in paths:
        start = time.monotonic()
        notebook = run(path)
        print(f"{path.stem}: {time.monotonic() - start:.0f} s", flush=True)
        if options.write:
            save(notebook, path)


if __name__ == "__main__":
    main()
