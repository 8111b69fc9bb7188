"""TreeQuest's algorithms as search strategies, through its ask/tell interface."""

from __future__ import annotations

import contextlib
import importlib
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from rlhf_data import UserError
from rlhf_infer.search.strategies import Expansion
from rlhf_infer.search.tree import ROOT, SearchTree

_ACTION = "step"
_ASKS = 8
"""Attempts per wave to get trials that extend an unfinished completion."""


class AskTell(Protocol):
    """The part of `treequest.Algorithm` that is used."""

    def init_tree(self) -> Any:
        """The state of an empty tree."""
        ...

    def ask_batch(self, state: Any, batch_size: int, actions: list[str]) -> tuple[Any, list[Any]]:
        """The next trials; each has a `trial_id` and the `parent_state` that it extends."""
        ...

    def tell(self, state: Any, trial_id: str, result: tuple[Any, float]) -> Any:
        """Record the result of a trial and its score."""
        ...


class TreeQuestStrategy:
    """Searches the tree of one prompt with a TreeQuest algorithm, such as AB-MCTS (arXiv:2503.04412).

        search.run(prompts, strategy=lambda: TreeQuestStrategy(treequest.ABMCTSA(), width=8))

    Each wave asks for `width` trials, and the steps of all prompts are generated and scored together. A trial
    that would extend a finished completion generates nothing; its result is that completion with its score.
    Identical steps count as separate trials, although the tree merges them. The algorithms use NumPy's global
    generator: it is seeded in every wave from seed, prompt and wave number, and restored afterwards, so the
    same seed gives the same tree.

    Args:
        algorithm: stateless, so prompts may share it.
        width: trials per wave, at least 1. Algorithms with a queue, such as `StandardMCTS` with its
            `samples_per_action`, get no more trials than they accept results.
        seed: for the algorithm's random choices.
        bounded: whether scores are in [0, 1], as the algorithms expect; if not, they go through a sigmoid.

    Raises:
        ValueError: `width` is below 1.
        UserError: during the search, if `bounded` is true and a score is outside [0, 1].
    """

    def __init__(self, algorithm: AskTell, *, width: int = 8, seed: int = 0, bounded: bool = True) -> None:
        if width < 1:
            raise ValueError(f"width is {width}; a wave needs at least one trial")
        self.algorithm, self.width, self.seed, self.bounded = algorithm, width, seed, bounded
        self.state = algorithm.init_tree()
        self._waves = 0
        self._asked: dict[int, list[str]] = {}
        """Trials in flight, by the node that they extend."""

    def choose(self, tree: SearchTree) -> list[Expansion]:
        """See `rlhf_infer.search.strategies.Strategy`."""
        self._asked = {}
        self._waves += 1
        with _seeded(f"{self.seed} {tree.prompt_ids} {self._waves}"):
            for _ in range(_ASKS):
                missing = self.width - sum(map(len, self._asked.values()))
                if not missing:
                    break
                self.state, trials = self.algorithm.ask_batch(self.state, missing, [_ACTION])
                queued = _queued(self.state)
                for trial in trials[:queued]:
                    node = ROOT if trial.parent_state is None else int(trial.parent_state)
                    if tree.nodes[node].is_open:
                        self._asked.setdefault(node, []).append(trial.trial_id)
                    else:
                        self._tell(tree, trial.trial_id, node)
                if queued is not None and self._asked:  # asking again would repeat the queued nodes
                    break
        return [Expansion(node, len(trials)) for node, trials in self._asked.items()]

    def take(self, tree: SearchTree, drawn: Sequence[tuple[Expansion, Sequence[int]]]) -> None:
        """See `rlhf_infer.search.strategies.Strategy`."""
        for expansion, children in drawn:
            trials = self._asked[expansion.node]
            for trial, child in zip(trials, children, strict=False):  # fewer at the end of the budget
                self._tell(tree, trial, child)

    def _tell(self, tree: SearchTree, trial: str, node: int) -> None:
        score = tree.nodes[node].score
        assert score is not None  # every drawn node is scored
        if not self.bounded:
            score = 0.5 + math.tanh(score / 2) / 2
        if not 0 <= score <= 1:
            raise UserError(
                f"TreeQuest expects scores in [0, 1], but a completion scored {score}; use a process reward "
                "model, or pass bounded=False",
                code="score_out_of_range",
            )
        self.state = self.algorithm.tell(self.state, trial, (node, score))


def ab_mcts(width: int, seed: int, *, bounded: bool) -> TreeQuestStrategy:
    """TreeQuest's adaptive branching Monte Carlo tree search with its own settings (arXiv:2503.04412)."""
    return TreeQuestStrategy(imported().ABMCTSA(), width=width, seed=seed, bounded=bounded)


def imported() -> Any:
    """TreeQuest; it is an extra.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module("treequest")
    except ImportError as error:
        raise UserError(
            f'the search ab-mcts needs TreeQuest ({error}); pip install "rlhf-infer[treequest]"',
            code="missing_package",
            package="treequest",
        ) from error


def _queued(state: Any) -> int | None:
    """How many results an algorithm with a queue accepts now; None for algorithms without one."""
    queue = getattr(getattr(state, "trial_store", None), "next_nodes", None)
    return None if queue is None else sum(map(len, queue.values()))


@contextlib.contextmanager
def _seeded(text: str) -> Iterator[None]:
    """Seed NumPy's global generator from a text within this context."""
    before = np.random.get_state()
    np.random.seed(zlib.crc32(text.encode()))
    try:
        yield
    finally:
        np.random.set_state(before)
