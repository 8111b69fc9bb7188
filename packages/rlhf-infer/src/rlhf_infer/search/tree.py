"""A prompt's search tree: steps, what drawing them gave, visits and values; to and from JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlhf_data import Text, UserError, atomic_write_text

Terminal = Literal["end", "stop", "checked", "length"]
"""End of a completion: end token, stop text, checker, or the longest length allowed."""
ROOT = 0
"""Number of the root, which has no tokens."""


@dataclass
class SearchNode:
    """A step of completions, and through its ancestors the completion so far.

    Args:
        id: its place in `SearchTree.nodes`.
        parent: the node that it continues; -1 for the root.
        token_ids: tokens of the step, its separator or end token included.
        logps: the engine's log-probs of these tokens at the sampling temperature.
        finish_reason: the engine's, `stop` at a separator, stop text or end token.
        terminal: what ended the completion; None for one that can go on.
        cut: whether the budget ended the step; it does not go on.
        score: of the completion so far; None until it is scored.
        prior: P of the bonus in MCTS; siblings' add up to 1.
        visits: draws that ended here or below.
        value: mean (or maximum) of the scores that these draws got.
        draws: ids of its children in the order drawn; a step drawn twice is there twice.
    """

    id: int
    parent: int
    token_ids: tuple[int, ...] = ()
    logps: tuple[float, ...] = ()
    finish_reason: Literal["stop", "length"] = "length"
    terminal: Terminal | None = None
    cut: bool = False
    score: float | None = None
    prior: float = 1.0
    visits: int = 0
    value: float = 0.0
    draws: list[int] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Whether steps can follow it."""
        return self.terminal is None and not self.cut


@dataclass(frozen=True)
class Draw:
    """One step that was drawn after a path."""

    token_ids: tuple[int, ...]
    logps: tuple[float, ...]
    finish_reason: Literal["stop", "length"]


class SearchTree:
    """The steps drawn after a prompt, equal siblings merged.

    Args:
        prompt: what scorers read: a text or messages.
        prompt_ids: what the policy reads.
        made_with: what decides draws and scores (sampling parameters, separator, scorer), as JSON values; a
            search is resumed with the same only.
    """

    def __init__(
        self, prompt: Text, prompt_ids: Sequence[int], made_with: Mapping[str, Any] | None = None
    ) -> None:
        self.prompt, self.prompt_ids = prompt, tuple(prompt_ids)
        self.made_with = dict(made_with or {})
        self.nodes: list[SearchNode] = [SearchNode(ROOT, -1)]
        self.spent = 0
        """Tokens generated, a step that was drawn twice counted twice."""
        self._ids: list[tuple[int, ...]] = [()]

    def path(self, node: int) -> list[int]:
        """Ids of the nodes from the root to this one, both included."""
        found = [node]
        while (node := self.nodes[node].parent) >= 0:
            found.append(node)
        return found[::-1]

    def completion_ids(self, node: int) -> tuple[int, ...]:
        """Tokens of the completion that ends with a node."""
        return self._ids[node]

    def logps(self, node: int) -> list[float]:
        """Log-probs of the tokens of the completion that ends with a node."""
        return [logp for each in self.path(node) for logp in self.nodes[each].logps]

    def children(self, node: int) -> list[int]:
        """Ids of a node's children, each once, in the order first drawn."""
        return list(dict.fromkeys(self.nodes[node].draws))

    @property
    def finished(self) -> list[int]:
        """Ids of the nodes that end a completion."""
        return [node.id for node in self.nodes if node.terminal is not None]

    def add(self, parent: int, draw: Draw, *, terminal: Terminal | None, cut: bool) -> int:
        """Take a step that was drawn; returns its node, which an equal sibling is already."""
        self.spent += len(draw.token_ids)
        same = (each for each in self.children(parent) if self.nodes[each].token_ids == draw.token_ids)
        child = next(same, None)
        if child is None:
            child = len(self.nodes)
            node = SearchNode(child, parent, draw.token_ids, draw.logps, draw.finish_reason, terminal, cut)
            self.nodes.append(node)
            self._ids.append(self._ids[parent] + draw.token_ids)
        self.nodes[parent].draws.append(child)
        return child

    def back_up(self, node: int, score: float, how: Literal["mean", "max"] = "mean") -> None:
        """Count a draw that ended in a node, for it and its ancestors: N + 1, and Q with the score."""
        for each in map(self.nodes.__getitem__, self.path(node)):
            each.visits += 1
            if how == "mean" or each.visits == 1:
                each.value += (score - each.value) / each.visits
            else:
                each.value = max(each.value, score)

    def recorded(self) -> dict[tuple[int, ...], tuple[list[Draw], float | None]]:
        """For the tokens of every completion so far, what was drawn after them, in order, and its score."""
        steps = [Draw(node.token_ids, node.logps, node.finish_reason) for node in self.nodes]
        return {
            self._ids[node.id]: ([steps[child] for child in node.draws], node.score) for node in self.nodes
        }

    def lines(self) -> Iterator[str]:
        """JSON lines: one of the prompt, one of every node in the order of their ids."""
        head = {"prompt": self.prompt, "prompt_ids": list(self.prompt_ids), "made_with": self.made_with}
        yield json.dumps(head | {"nodes": len(self.nodes)}, ensure_ascii=False)
        for node in self.nodes:
            yield json.dumps(vars(node))

    @classmethod
    def from_lines(cls, lines: Iterable[str], most: int | None = None) -> list[SearchTree]:
        """The trees that `lines` gave, one after another; of the first `most` only, if given.

        Raises:
            UserError: a line is not one of a tree, or nodes are missing.
        """
        trees: list[SearchTree] = []
        left = 0
        for number, line in enumerate(lines, 1):
            if not left and len(trees) == most:
                break
            try:
                row = json.loads(line)
                if left:
                    trees[-1]._take(row)
                    left -= 1
                else:
                    if not isinstance(row["prompt"], str):
                        [message["content"] for message in row["prompt"]]
                    trees.append(cls(row["prompt"], row["prompt_ids"], row["made_with"]))
                    left = int(row["nodes"])
                    trees[-1].nodes, trees[-1]._ids = [], []
            except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
                raise UserError(
                    f"line {number} is not one of a search tree ({type(error).__name__}: {error}); give a "
                    "file that a search has written",
                    code="not_a_search_tree",
                    line=number,
                ) from error
        if left:
            raise UserError(
                f"the last search tree misses {left} nodes; give a whole file", code="not_a_search_tree"
            )
        for tree in trees:
            if any(child >= len(tree.nodes) for node in tree.nodes for child in node.draws):
                raise UserError("a search tree has draws that it misses", code="not_a_search_tree")
            draws = (child for node in tree.nodes for child in node.draws)
            tree.spent = sum(len(tree.nodes[child].token_ids) for child in draws)
        return trees

    def _take(self, row: Mapping[str, Any]) -> None:
        node = SearchNode(**row)
        node.token_ids, node.logps = tuple(node.token_ids), tuple(node.logps)
        if node.id != len(self.nodes) or not (0 <= node.parent < node.id if node.id else node.parent == -1):
            raise ValueError(f"node {node.id} is out of order")
        _check_numbers(node)
        self.nodes.append(node)
        self._ids.append((() if node.parent < 0 else self._ids[node.parent]) + node.token_ids)


def _check_numbers(node: SearchNode) -> None:
    ids = (*node.token_ids, *node.draws)
    if not all(isinstance(each, int) and 0 <= each < 1 << 31 for each in ids):
        raise ValueError(f"node {node.id} has a token id or draw that is not an integer in range")
    for number in (node.value, node.prior, node.visits, 0 if node.score is None else node.score):
        if not isinstance(number, int | float) or abs(number) > 1 << 62:
            raise ValueError(f"node {node.id} has {number!r} where a finite number is expected")


def write_trees(path: str | Path, trees: Sequence[SearchTree]) -> None:
    """Write search trees as JSON lines, atomically."""
    atomic_write_text(path, "".join(line + "\n" for tree in trees for line in tree.lines()))


def read_trees(path: str | Path, most: int | None = None) -> list[SearchTree]:
    """Read the search trees of a file; or the first `most`, without what a killed process left after them.

    Raises:
        UserError: it cannot be read, or holds something else.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return SearchTree.from_lines(file, most)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"search tree {path} cannot be read: {error}", code="unreadable_file") from error
    except UserError as error:
        raise UserError(f"{path}, {error}", code=error.code, **error.fields) from error
