"""Monte Carlo tree search over steps: PUCT or UCT, adaptive branching, virtual loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlhf_infer.search.settings import SearchSettings
from rlhf_infer.search.strategies import Expansion
from rlhf_infer.search.tree import ROOT, SearchTree


class MCTS:
    """From the root down to the child of the highest Q + bonus, until a node is to be drawn after.

        PUCT: Q + c · P · √N_parent / (1 + N)      (arXiv:1712.01815)
        UCT:  Q + c · √(ln N_parent / N)           (Kocsis and Szepesvári 2006, doi:10.1007/11871842_29)

    N counts the draws that ended in a node or below, Q is the mean (or the maximum) of their scores. A node
    without children is drawn after at once. Where there are some, drawing others competes with them as one
    more child, of prior 1, with the node's D draws so far as its visits and the mean of their own scores as
    its Q: where all children score low a new one may be right, the idea of adaptive branching
    (arXiv:2503.04412, with Thompson sampling there). A draw under way counts as `virtual_loss` visits of
    value 0. A finished completion has a known value and is not visited again; nodes below which nothing can
    be drawn are skipped, and where that is the root, it gets more children.

    Args:
        settings: see `SearchSettings`.
        bounded: whether scores are in [0, 1]; otherwise Q is scaled by the smallest and largest score of the
            tree (arXiv:1911.08265, equation 5).
    """

    def __init__(self, settings: SearchSettings, *, bounded: bool) -> None:
        self.settings, self.bounded = settings, bounded

    def choose(self, tree: SearchTree) -> list[Expansion]:
        """See `rlhf_infer.search.strategies.Strategy`."""
        walk = _Walk(tree, self.settings, self.bounded)
        chosen: list[Expansion] = []
        while len(chosen) < self.settings.nodes and walk.is_open[ROOT]:
            chosen.append(Expansion(walk.next(), self.settings.children))
        return chosen or [Expansion(ROOT, self.settings.children)]

    def take(self, tree: SearchTree, drawn: Sequence[tuple[Expansion, Sequence[int]]]) -> None:
        """See `rlhf_infer.search.strategies.Strategy`."""
        for expansion, _ in drawn:
            set_priors(tree, expansion.node, self.settings.prior)


def set_priors(tree: SearchTree, parent: int, kind: str) -> None:
    """Give the children of a node their priors: equal ones, or proportional to their probabilities."""
    children = [tree.nodes[child] for child in tree.children(parent)]
    logps = [math.fsum(child.logps) if kind == "logprob" else 0.0 for child in children]
    weights = [math.exp(logp - max(logps)) for logp in logps]
    for child, weight in zip(children, weights, strict=True):
        child.prior = weight / math.fsum(weights)


class _Walk:
    """The descents of one wave, each of which takes a node that the others then leave alone."""

    def __init__(self, tree: SearchTree, settings: SearchSettings, bounded: bool) -> None:
        self.tree, self.settings = tree, settings
        self.flying = [0] * len(tree.nodes)
        self.taken: set[int] = set()
        scores = [node.score for node in tree.nodes if node.score is not None]
        self.low, self.high = (0.0, 1.0) if bounded or not scores else (min(scores), max(scores))
        self.children = [tree.children(node.id) for node in tree.nodes]
        self.is_open = [False] * len(tree.nodes)
        for node in reversed(range(len(tree.nodes))):
            self.is_open[node] = self._is_open(node)

    def next(self) -> int:
        """The node that the next draws follow."""
        node = ROOT
        while (below := self._child(node)) is not None:
            node = below
        self.taken.add(node)
        for each in reversed(self.tree.path(node)):
            self.flying[each] += 1
            self.is_open[each] = self._is_open(each)
        return node

    def _child(self, node: int) -> int | None:
        """The child to which a descent continues from an open node; None to draw after the node itself."""
        children = [child for child in self.children[node] if self.is_open[child]]
        if not children:
            return None
        child = max(children, key=lambda child: (self._rank(child), -child))
        return None if self._may_draw(node) and self._rank_of_new(node) > self._rank(child) else child

    def _may_draw(self, node: int) -> bool:
        own = self.tree.nodes[node]
        return own.is_open and node not in self.taken and (self.settings.widen or not own.draws)

    def _is_open(self, node: int) -> bool:
        return self._may_draw(node) or any(self.is_open[child] for child in self.children[node])

    def _rank(self, node: int) -> float:
        """Q + bonus of a child."""
        own = self.tree.nodes[node]
        visits = own.visits + self.settings.virtual_loss * self.flying[node]
        quality = self._scaled(own.value) * own.visits / visits
        return quality + self._bonus(own.parent, own.prior, visits)

    def _rank_of_new(self, node: int) -> float:
        """Mean + bonus of drawing other children of a node."""
        draws = [self.tree.nodes[child].score or 0.0 for child in self.tree.nodes[node].draws]
        return self._scaled(math.fsum(draws) / len(draws)) + self._bonus(node, 1.0, len(draws))

    def _scaled(self, value: float) -> float:
        span = self.high - self.low
        return (value - self.low) / span if span else 0.5

    def _bonus(self, parent: int, prior: float, visits: float) -> float:
        above = self.tree.nodes[parent].visits + self.settings.virtual_loss * self.flying[parent]
        if self.settings.formula == "uct":
            return self.settings.c * math.sqrt(math.log(max(above, 1.0)) / visits)
        return self.settings.c * prior * math.sqrt(above) / (1 + visits)
