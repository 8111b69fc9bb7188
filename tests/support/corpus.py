"""The corpus of bad inputs, `tests/corpus`: its files by kind, and the form in which torture keeps inputs."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parents[1] / "corpus"
OUTCOMES = CORPUS / "outcomes.json"
KINDS = ("rows", "settings", "descriptions", "models", "merges", "pipelines", "requests")
GOOD = "good."
"""What names begin with of inputs that nothing is wrong with."""
_PARTS = ".parts"
_HEAD_END = b"\r\n\r\n"


def cases(kind: str) -> dict[str, bytes]:
    """Every input of a kind by its name; good ones come first."""
    found: dict[str, bytes] = {}
    for path in sorted((CORPUS / kind).iterdir()):
        if kind == "requests":
            found |= {json.loads(line)["name"]: line for line in path.read_bytes().splitlines()}
        elif path.name.endswith(_PARTS):
            found[path.name.removesuffix(_PARTS)] = joined(json.loads(path.read_text()))
        else:
            found[path.name] = path.read_bytes()
    return dict(sorted(found.items(), key=lambda item: (not item[0].startswith(GOOD), item[0])))


def joined(parts: list[list[Any]]) -> bytes:
    """What a file of parts stands for: pairs of a text and how often it is repeated."""
    return "".join(text * times for text, times in parts).encode()


def body_of(row: dict[str, Any]) -> bytes:
    """The bytes that a request sends."""
    if "base64" in row:
        return base64.b64decode(row["base64"])
    return joined(row["parts"]) if "parts" in row else row.get("body", "").encode()


def request_row(name: str, raw: bytes) -> dict[str, Any]:
    """The form of a request that is sent as these bytes."""
    head, _, body = raw.partition(_HEAD_END)
    line, *fields = head.decode("utf-8", "backslashreplace").split("\r\n")
    method, _, rest = line.partition(" ")
    headers = {key: value for key, _, value in (field.partition(": ") for field in fields)}
    row: dict[str, Any] = {
        "name": name,
        "method": method,
        "path": rest.rpartition(" ")[0],
        "headers": headers,
    }
    try:
        return row | {"body": body.decode()}
    except UnicodeDecodeError:
        return row | {"base64": base64.b64encode(body).decode()}


def keep(folder: Path, kind: str, name: str, data: bytes) -> Path:
    """Save an input as the corpus has it; the file."""
    if kind == "requests":
        name, data = f"{name}.jsonl", json.dumps(request_row(name, data)).encode() + b"\n"
    path = folder / kind / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
