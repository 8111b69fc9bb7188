"""Draws docs/images/packages.svg: the packages, their rooms, and who imports whom, read from the code itself.

`draw_packages.py` prints the picture, `--write` renews the file.
"""

from __future__ import annotations

import argparse
import html
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs/images/packages.svg"
ORDER = ("data", "models", "infer", "eval", "algos", "minmax")
"""The libraries, each importing only those before it."""
WIDTH, GAP, LINE, HEAD, MARGIN, ARC = 172, 26, 17, 46, 20, 36
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1c2430; } .name { font-weight: 600; font-size: 14px; }
.soft { fill: #5a6472; font-size: 11px; } rect { fill: #fff; stroke: #0072b2; stroke-width: 1.5; }
rect.app { stroke: #d55e00; } rect.alone { stroke: #666; }
path { fill: none; stroke: #9aa4b2; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e9ee; } .soft { fill: #a3abb8; } rect { fill: #1a2029; }
}
"""


def packages() -> dict[str, tuple[str, list[str], set[str]]]:
    """Description, rooms and imported siblings of each package, by its name without `rlhf-`."""
    found = {}
    for file in sorted(ROOT.glob("*/rlhf-*/pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        name = project["name"].removeprefix("rlhf-")
        source = next(file.parent.glob("src/rlhf_*"))
        rooms = sorted(path.parent.name for path in source.glob("*/__init__.py"))
        imported = {
            match
            for module in source.rglob("*.py")
            for match in re.findall(r"^\s*(?:from|import) rlhf_(\w+)", module.read_text(), re.M)
        }
        found[name] = project["description"], rooms, imported - {name}
    return found


def draw() -> str:
    """The picture as an SVG document."""
    all_of_them = packages()
    apps = [name for name in all_of_them if (ROOT / "apps" / f"rlhf-{name}").is_dir()]
    alone = [name for name in all_of_them if name not in (*ORDER, *apps)]
    tallest = max(len(all_of_them[name][1]) for name in ORDER)
    top, below = MARGIN + ARC, MARGIN + ARC + HEAD + tallest * LINE + 60
    places = {name: (MARGIN + i * (WIDTH + GAP), top) for i, name in enumerate(ORDER)}
    places |= {name: (MARGIN + i * (WIDTH + GAP), below) for i, name in enumerate((*apps, *alone))}
    boxes, arrows = "", ""
    for name, (x, y) in places.items():
        _, rooms, imported = all_of_them[name]
        kind = "app" if name in apps else "alone" if name in alone else "library"
        height = HEAD + len(rooms) * LINE
        boxes += f'<rect class="{kind}" x="{x}" y="{y}" width="{WIDTH}" height="{height}" rx="8"/>'
        boxes += f'<text class="name" x="{x + 12}" y="{y + 22}">rlhf-{name}</text>'
        for i, room in enumerate(rooms):
            boxes += f'<text x="{x + 12}" y="{y + HEAD + i * LINE}">{html.escape(room)}/</text>'
        for nearest in _nearest(imported, all_of_them):
            arrows += _arrow(places[nearest], HEAD + len(all_of_them[nearest][1]) * LINE, (x, y))
    width = MARGIN * 2 + len(ORDER) * WIDTH + (len(ORDER) - 1) * GAP
    height = below + HEAD + max(len(all_of_them[name][1]) for name in (*apps, *alone)) * LINE + 44
    legend = "An arrow goes from a package to what imports it; arrows that others imply are left out. "
    legend += "Blue: libraries, orange: commands, grey: imports none of the others."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        f"<title>The packages, their rooms, and who imports whom</title><style>{_STYLE}</style>"
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M1,1 L7,4 L1,7" /></marker></defs>'
        f"{arrows}{boxes}"
        f'<text class="soft" x="{MARGIN}" y="{height - 16}">{html.escape(legend)}</text></svg>\n'
    )


def _nearest(imported: set[str], all_of_them: dict[str, tuple[str, list[str], set[str]]]) -> list[str]:
    """The imported packages that no other imported one imports."""
    implied = {name for each in imported for name in all_of_them[each][2]}
    return sorted(imported - implied)


def _arrow(start: tuple[int, int], height: int, end: tuple[int, int]) -> str:
    (x1, y1), (x2, y2) = start, end
    if x2 == x1 + WIDTH + GAP and y1 == y2:
        return f'<path marker-end="url(#tip)" d="M{x1 + WIDTH},{y1 + 24} L{x2},{y2 + 24}"/>'
    if y1 == y2:  # over the boxes between them
        x1, x2, over = x1 + WIDTH * 3 // 4, x2 + WIDTH // 4, y1 - ARC
        return f'<path marker-end="url(#tip)" d="M{x1},{y1} C{x1},{over} {x2},{over} {x2},{y2}"/>'
    x1, y1, x2, over = x1 + WIDTH // 2, y1 + height, x2 + WIDTH // 2, y2 - 30
    return f'<path marker-end="url(#tip)" d="M{x1},{y1} C{x1},{over} {x2},{over} {x2},{y2}"/>'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="Renew the file.")
    if parser.parse_args().write:
        PICTURE.write_text(draw(), encoding="utf-8")
    else:
        print(draw(), end="")
