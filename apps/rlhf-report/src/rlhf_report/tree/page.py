"""The page of search trees: a picture of each, from the prompt on the left to the ends of completions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_eval.html import number, page, section, table, text, verbatim

if TYPE_CHECKING:
    from rlhf_infer import SearchNode, SearchTree

Decode = Callable[[Sequence[int]], str]
"""Gives the text of tokens."""
_WIDTH, _HEIGHT, _GAP, _ROW = 190, 22, 44, 28
"""Of a step, the space to the next one, and from one line of steps to the next, in pixels."""
_LETTERS = 24
_STYLE = """<style>
.tree { overflow-x: auto; } .tree svg { display: block; }
.tree rect { fill: var(--blue); fill-opacity: var(--value, 0); stroke: var(--line); }
.tree .best rect { stroke: var(--orange); stroke-width: 2; } .tree .cut rect { stroke-dasharray: 4 3; }
.tree path { fill: none; stroke: var(--line); } .tree path.best { stroke: var(--orange); }
.tree .step { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.tree .end { fill: var(--ink); } .tree .more { fill: var(--soft); font-size: 11px; }
</style>
"""
_KEY = (
    "Each box is a step, and the line before it is as thick as it was visited often. The bluer a box, the "
    "higher the value of what follows it, from the lowest to the highest of its tree. A dot marks the end of "
    "a completion, a dashed box one that the budget ended; orange is the way to the finished completion with "
    "the highest score. Rest the pointer on a box to read all of it."
)


@dataclass(frozen=True)
class Placed:
    """A node in the picture: its column, the middle of its row, and how many children are left out."""

    node: SearchNode
    column: int
    row: float
    hidden: int


def trees_page(trees: Sequence[SearchTree], decode: Decode, *, most_nodes: int, source: str) -> str:
    """One HTML file that loads nothing from outside.

    Args:
        trees: searches, at least one.
        decode: gives the text of tokens.
        most_nodes: steps drawn of each tree, the most visited.
        source: where the trees are from.
    """
    counts = f"{len(trees)} search tree{'s' if len(trees) > 1 else ''} of {source}"
    body = f"{_STYLE}<h1>What the search tried</h1>\n<p>{text(counts)}. {text(_KEY)}</p>\n"
    for place, tree in enumerate(trees, 1):
        body += section(f"Prompt {place}", _tree(tree, decode, most_nodes))
    return page("Search trees", body)


def _tree(tree: SearchTree, decode: Decode, most_nodes: int) -> str:
    shown = most_visited(tree, most_nodes)
    best = best_finished(tree)
    placed = layout(tree, shown)
    prompt = tree.prompt if isinstance(tree.prompt, str) else "\n".join(m["content"] for m in tree.prompt)
    figures = [
        ["steps", f"{len(tree.nodes) - 1:,}"],
        ["tokens generated", f"{tree.spent:,}"],
        ["finished completions", f"{len(tree.finished):,}"],
        ["longest, in steps", f"{max(len(tree.path(node.id)) - 1 for node in tree.nodes):,}"],
        ["highest score", number(None if best is None else tree.nodes[best].score)],
    ]
    found = verbatim(prompt) + table(["", ""], figures, numeric=True, narrow=True)
    if len(shown) < len(tree.nodes):
        found += f"<p>Drawn are the {len(shown) - 1:,} steps that were visited most.</p>"
    found += f'<div class="tree">{_svg(tree, placed, best, decode)}</div>'
    if best is not None:
        answer = verbatim(decode(tree.completion_ids(best)))
        found += f"<details><summary>The completion with the highest score</summary>{answer}</details>"
    return found


def best_finished(tree: SearchTree) -> int | None:
    """The finished node with the highest score, the first of equals; None if none is scored."""
    scores = {node: tree.nodes[node].score for node in tree.finished}
    scores = {node: score for node, score in scores.items() if score is not None and math.isfinite(score)}
    return max(scores, key=scores.__getitem__, default=None)


def most_visited(tree: SearchTree, most: int) -> set[int]:
    """The root, the way to the best completion, and the most visited nodes with all their ancestors."""
    best = best_finished(tree)
    shown = set(tree.path(best if best is not None else 0))
    for node in sorted(tree.nodes, key=lambda node: (-node.visits, node.id)):
        way = set(tree.path(node.id)) - shown
        if len(shown) - 1 + len(way) <= most:
            shown |= way
    return shown


def layout(tree: SearchTree, shown: set[int]) -> list[Placed]:
    """Where the nodes go: leaves below one another, parents in the middle of their children."""
    children = {node: [child for child in tree.children(node) if child in shown] for node in shown}
    rows: dict[int, float] = {}
    column = {0: 0}
    free = 0
    order, waiting = [], [0]
    while waiting:  # parents before children, so that backwards children come first
        order.append(node := waiting.pop())
        for child in reversed(children[node]):
            column[child] = column[node] + 1
            waiting.append(child)
    for node in order:
        if not children[node]:
            rows[node], free = float(free), free + 1
    for node in reversed(order):
        if children[node]:
            rows[node] = (rows[children[node][0]] + rows[children[node][-1]]) / 2
    return [
        Placed(tree.nodes[node], column[node], rows[node], len(tree.children(node)) - len(children[node]))
        for node in order
    ]


def _svg(tree: SearchTree, placed: Sequence[Placed], best: int | None, decode: Decode) -> str:
    width = (max(each.column for each in placed) + 1) * (_WIDTH + _GAP)
    height = int((max(each.row for each in placed) + 1) * _ROW) + 8
    on_best = set(tree.path(best)) if best is not None else set()
    at = {each.node.id: each for each in placed}
    lines = [_line(at[each.node.parent], each, on_best) for each in placed if each.node.id]
    values = [each.node.value for each in placed if each.node.id and math.isfinite(each.node.value)] or [0.0]
    boxes = [_box(each, min(values), max(values), on_best, decode) for each in placed]
    return f'<svg width="{width}" height="{height}" role="img">{"".join(lines)}{"".join(boxes)}</svg>'


def _line(parent: Placed, child: Placed, on_best: set[int]) -> str:
    x, y = parent.column * (_WIDTH + _GAP) + _WIDTH, parent.row * _ROW + _HEIGHT / 2 + 4
    to_x, to_y = x + _GAP, child.row * _ROW + _HEIGHT / 2 + 4
    thick = 1 + 5 * child.node.visits / max(parent.node.visits, 1)
    kind = ' class="best"' if child.node.id in on_best else ""
    middle = x + _GAP / 2
    return (
        f'<path{kind} stroke-width="{thick:.1f}" '
        f'd="M{x} {y:.1f}C{middle} {y:.1f} {middle} {to_y:.1f} {to_x} {to_y:.1f}"/>'
    )


def _box(each: Placed, low: float, high: float, on_best: set[int], decode: Decode) -> str:
    node, x, y = each.node, each.column * (_WIDTH + _GAP), each.row * _ROW + 4
    words = decode(node.token_ids) if node.id else "prompt"
    known = node.id and high > low and math.isfinite(node.value)
    share = (node.value - low) / (high - low) if known else 0.0
    kinds = " ".join(_kinds(node, on_best))
    parts = [
        f'<g class="{kinds}"><title>{text(_told(node, words))}</title>',
        f'<rect x="{x}" y="{y:.1f}" width="{_WIDTH}" height="{_HEIGHT}" rx="4" '
        f'style="--value:{0.05 + 0.45 * share:.2f}"/>',
        f'<text class="step" x="{x + 6}" y="{y + 15:.1f}">{text(_short(words))}</text>',
    ]
    if node.terminal is not None:
        parts.append(f'<circle class="end" cx="{x + _WIDTH}" cy="{y + _HEIGHT / 2:.1f}" r="4"/>')
    if each.hidden:
        parts.append(f'<text class="more" x="{x + _WIDTH + 6}" y="{y + 9:.1f}">+{each.hidden}</text>')
    return "".join(parts) + "</g>"


def _kinds(node: SearchNode, on_best: set[int]) -> Iterator[str]:
    if node.id in on_best:
        yield "best"
    if node.cut:
        yield "cut"


def _told(node: SearchNode, words: str) -> str:
    lines = [words, f"visits {node.visits}, value {number(node.value)}, prior {number(node.prior)}"]
    if node.score is not None:
        lines.append(f"score {number(node.score)}")
    if node.terminal is not None:
        lines.append(f"ended by {node.terminal}")
    return "\n".join(lines)


def _short(words: str) -> str:
    line = " ".join(words.split())
    return line if len(line) <= _LETTERS else line[: _LETTERS - 1] + "…"
