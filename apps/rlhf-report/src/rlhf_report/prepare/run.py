"""`rlhf-report prepare`: its settings, both passes over the rows with their progress, and the folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_data import (
    PreprocessConfig,
    SettingsSource,
    UserError,
    atomic_folder,
    atomic_write_json,
    atomic_write_text,
    detect_kind,
    ensure_writable_folder,
    load_config_file,
    prepare_rows,
    read_items,
    scan_rows,
    write_prepared,
)
from rlhf_report.options import named_columns, tokenizer_of
from rlhf_report.prepare.page import prepare_page
from rlhf_report.prepare.words import summary

_WRITTEN_BY = "rlhf-report prepare"


def run_prepare(given: dict[str, Any]) -> None:
    """Prepare the data, write the folder, and print a summary."""
    config = _settings(given)
    out = _folder(given)
    paths = list(given["data"])
    for path in paths:
        _check_readable_twice(path)
    columns = named_columns(given["columns"])
    kind = given["kind"] or detect_kind(paths[0], columns)
    if kind != "preference" and config.margins != "keep":
        raise UserError(
            f"--margins {config.margins} is for pairs, and the rows are {kind}; leave it out",
            code="invalid_value",
            key="margins",
        )
    tokenizer = tokenizer_of(given["tokenizer"]) if given["tokenizer"] else None
    for path in given["against"]:
        next(iter(scan_rows(path)))  # refuses a bad file before the long work
    options = {"columns": columns, "source_column": given["source_column"]}
    with _progress() as report:
        if out is not None:
            ensure_writable_folder(out.parent)
        prepared = prepare_rows(
            lambda: read_items(paths, kind, config, **options),
            config,
            tokenizer,
            against=given["against"],
            on_bad_row=given["on_bad_row"],
            on_progress=report,
        )
        if out is None:
            print("\n".join(["Nothing is written (--dry-run).", *summary(prepared.report, {})]))
            return
        with atomic_folder(out) as folder:
            found = write_prepared(prepared, folder, on_progress=report)
            found = {"written_by": _WRITTEN_BY, "data": paths, "kind": kind} | found
            atomic_write_json(folder / "report.json", found | {"shown": _places(found["shown"])})
            atomic_write_text(folder / "report.html", prepare_page(found))
            _folder(given)  # another command may have written there meanwhile
    print("\n".join(summary(found, found["shown"]["dropped"])))
    files = "train.jsonl and eval.jsonl" if found["rows"]["eval"] else "train.jsonl (no row is held out)"
    print(f"Wrote {files} in {out}; the page: {out / 'report.html'}")


def _check_readable_twice(path: str) -> None:
    """Refuse a pipe: rows are read once to decide about them, and again to write them."""
    found = Path(path)
    if found.exists() and not (found.is_file() or found.is_dir()):
        raise UserError(
            f"{path} is a pipe, and rows are read twice; write them to a file first",
            code="not_a_file",
            path=path,
        )


def _settings(given: dict[str, Any]) -> PreprocessConfig:
    values = load_config_file(given["config"]) if given["config"] else {}
    chosen = {key: given[key] for key in PreprocessConfig.model_fields if given.get(key) is not None}
    flags = tuple((key, f"--{key.replace('_', '-')}") for key in chosen)
    return PreprocessConfig.from_dict(values | chosen, SettingsSource(given["config"] or "options", flags))


def _folder(given: dict[str, Any]) -> Path | None:
    """Where to write; None for a dry run."""
    if given["dry_run"]:
        return None
    if given["out"] is None:
        raise UserError("--out is missing; give the folder to write, or --dry-run", code="missing_option")
    out = Path(given["out"])
    if out.is_file():
        raise UserError(f"--out {out} is a file; give a folder", code="not_a_folder")
    if not out.is_dir() or not any(out.iterdir()):
        return out
    if not given["overwrite"]:
        raise UserError(
            f"--out {out} is not empty; give another folder, or --overwrite to replace an earlier result",
            code="folder_not_empty",
            folder=str(out),
        )
    try:
        written_by = json.loads((out / "report.json").read_text(encoding="utf-8")).get("written_by")
    except (OSError, ValueError, AttributeError):
        written_by = None
    if written_by != _WRITTEN_BY:
        raise UserError(
            f"--out {out} holds other files than those of {_WRITTEN_BY}; give another folder",
            code="folder_not_empty",
            folder=str(out),
        )
    return out


def _places(shown: dict[str, Any]) -> dict[str, Any]:
    """File and line of the first rows by reason, and of rows that changed, without their texts."""
    dropped = {reason: [entry["where"] for entry in entries] for reason, entries in shown["dropped"].items()}
    return {"dropped": dropped, "changed": [entry["where"] for entry in shown["changed"]]}


@contextmanager
def _progress() -> Iterator[Callable[[str, int], None]]:
    """A line on the terminal that counts rows; nothing without a terminal."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    shown = TextColumn("{task.description}"), TextColumn("{task.completed:,} rows"), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*shown, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=None)
            progress.update(tasks[stage], completed=done)

        yield report
