"""JSON whose values are replaced, removed, renamed or doubled, drawn from a seed."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from typing import Any

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 5, 1.5, math.nan, math.inf, 10**30),
    *("", "x", "\ud800", "\0", "../x", "a" * 300),
    *([], {}, [5], ["x"], [[]], {"x": 1}, {"": None}, [{}], {"x": {"x": []}}, [None] * 3),
)
"""What takes the place of a value."""

DEEP = "[" * 5000 + "]" * 5000


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a JSON value with each of its keys."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


def mutated(text: str, rng: random.Random) -> bytes:
    """JSON with one to three of its values replaced, removed, renamed or doubled, or with damaged bytes."""
    if rng.random() < 0.1:
        raw = bytearray(text.encode())
        raw[rng.randrange(len(raw))] = rng.randrange(256)
        return bytes(raw[: rng.randrange(len(raw))] if rng.random() < 0.3 else raw)
    content = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        found = list(places(content)) if isinstance(content, dict | list) else []
        if not found or rng.random() < 0.03:
            return json.dumps(rng.choice(ODD)).encode()
        box, key = rng.choice(found)
        match rng.randrange(6):
            case 0:
                del box[key]
            case 1 if isinstance(box, dict):
                box[str(rng.choice(ODD))] = box.pop(key)
            case 2 if isinstance(box, list):
                box.append(box[key])
            case 3:
                box[key] = "DEEP"
            case _:
                box[key] = rng.choice(ODD)
    return json.dumps(content).replace('"DEEP"', DEEP).encode()
