"""Which nodes are extended next: best-of-N, beam, diverse verifier tree search, best-first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rlhf_infer.search.settings import SearchSettings
from rlhf_infer.search.tree import ROOT, SearchTree


@dataclass(frozen=True)
class Expansion:
    """Draws `count` steps after a node."""

    node: int
    count: int


class Strategy(Protocol):
    """Searches the tree of one prompt; its caller draws, scores and backs up."""

    def choose(self, tree: SearchTree) -> list[Expansion]:
        """Nodes to draw from next, the most important first; none at the end."""
        ...

    def take(self, tree: SearchTree, drawn: Sequence[tuple[Expansion, Sequence[int]]]) -> None:
        """Take the nodes that were drawn for the choice, in its order; fewer where the budget ran short."""
        ...


def score_of(tree: SearchTree, node: int) -> float:
    """A node's score; that of the root, or of a node that nothing scored, is the lowest."""
    score = tree.nodes[node].score
    return -math.inf if score is None else score


def best(tree: SearchTree, nodes: Sequence[int], count: int) -> list[int]:
    """The nodes with the highest scores, each once; of equal ones the first drawn."""
    return sorted(set(nodes), key=lambda node: (-score_of(tree, node), node))[:count]


class BestOfN:
    """Whole completions, `width` at a time."""

    def __init__(self, settings: SearchSettings) -> None:
        self.width = settings.width

    def choose(self, tree: SearchTree) -> list[Expansion]:
        """See `Strategy`."""
        return [Expansion(ROOT, self.width)]

    def take(self, tree: SearchTree, drawn: Sequence[tuple[Expansion, Sequence[int]]]) -> None:
        """See `Strategy`."""


class Beam:
    """The `width / branch` best steps are kept, and `branch` drawn after each (arXiv:2408.03314, section 5).

    A finished completion among the best keeps its place, so that fewer are extended.
    """

    def __init__(self, settings: SearchSettings) -> None:
        self.width, self.branch, self.kept = settings.width, settings.children, settings.nodes
        self.rounds_left = math.inf if settings.rounds is None else settings.rounds
        self._start()

    def _start(self) -> None:
        self.beams, self.done = [ROOT], 0
        self.rounds_left -= 1

    def choose(self, tree: SearchTree) -> list[Expansion]:
        """See `Strategy`."""
        if not self.beams and self.rounds_left > 0:
            self._start()
        return [
            Expansion(node, self.width if node == ROOT else self.branch)
            for node in best(tree, self.beams, self.kept)
        ]

    def take(self, tree: SearchTree, drawn: Sequence[tuple[Expansion, Sequence[int]]]) -> None:
        """See `Strategy`."""
        extended = {expansion.node for expansion, _ in drawn}
        waiting = [node for node in self.beams if node not in extended]  # the budget had nothing for them
        new = [child for _, children in drawn for child in children]
        kept = best(tree, waiting + new, self.kept - self.done)
        self.beams = [node for node in kept if tree.nodes[node].is_open]
        self.done += len(kept) - len(self.beams)


class DVTS:
    """`width / branch` independent subtrees; in each the best of `branch` steps is extended.

    Diverse verifier tree search (Beeching, Tunstall and Rush 2024, "Scaling test-time compute"): a step that
    scores high everywhere cannot crowd out the other subtrees, as it does in a beam.
    """

    def __init__(self, settings: SearchSettings) -> None:
        self.width, self.branch = settings.width, settings.children
        self.rounds_left = math.inf if settings.rounds is None else settings.rounds
        self._start()

    def _start(self) -> None:
        self.heads = [ROOT]
        self.rounds_left -= 1

    def choose(self, tree: SearchTree) -> list[Expansion]:
        """See `Strategy`."""
        if not self.heads and self.rounds_left > 0:
            self._start()
        return [Expansion(node, self.width if node == ROOT else self.branch) for node in self.heads]

    def take(self, tree: SearchTree, drawn: Sequence[tuple[Expansion, Sequence[int]]]) -> None:
        """See `Strategy`."""
        heads: list[int] = []
        for _, children in drawn:
            for start in range(0, len(children), self.branch):
                heads += best(tree, children[start : start + self.branch], 1)
        heads += self.heads[len(drawn) :]  # the budget had nothing for them
        self.heads = [node for node in heads if tree.nodes[node].is_open]


class BestFirst:
    """Of all open steps of the tree, the `width / branch` with the highest scores are extended, once each.

    Where none is left, the prompt gets `width` new first steps.
    """

    def __init__(self, settings: SearchSettings) -> None:
        self.width, self.branch, self.count = settings.width, settings.children, settings.nodes

    def choose(self, tree: SearchTree) -> list[Expansion]:
        """See `Strategy`."""
        open_nodes = [node.id for node in tree.nodes[1:] if node.is_open and not node.draws]
        chosen = best(tree, open_nodes, self.count)
        return [Expansion(node, self.branch) for node in chosen] or [Expansion(ROOT, self.width)]

    def take(self, tree: SearchTree, drawn: Sequence[tuple[Expansion, Sequence[int]]]) -> None:
        """See `Strategy`."""
