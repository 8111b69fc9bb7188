"""JSON files and files of JSON lines, and what a command that went well printed."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CLOCK = ("step_time", "time/", "tokens_per_second", "samples_per_second", "peak_memory_gb")
"""How keys of metrics begin that two equal runs differ in."""


def read_json(path: str | Path) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def read_lines(path: str | Path) -> list[Any]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def write_lines(path: str | Path, rows: Iterable[Any]) -> Path:
    """Write rows as JSON lines, compressed where the name says so; the path."""
    path = Path(path)
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def metrics_of(run: str | Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what the clock says."""
    rows = read_lines(Path(run, "metrics.jsonl"))
    return [{key: value for key, value in row.items() if not key.startswith(CLOCK)} for row in rows]


def done(result: Any) -> str:
    """What a command printed that ended well."""
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def png_size(path: Path) -> tuple[int, int]:
    """Width and height of a PNG file."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])
