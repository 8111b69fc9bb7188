"""Algorithms of TreeQuest as strategies of a search: asked for steps to draw, told what came of them."""

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
"""Times that a wave is asked for more where all that it got follows finished completions."""


class AskTell(Protocol):
    """What is called of a `treequest.Algorithm`."""

    def init_tree(self) -> Any:
        """The state of an empty tree."""
        ...

    def ask_batch(self, state: Any, batch_size: int, actions: list[str]) -> tuple[Any, list[Any]]:
        """The next trials, each with `trial_id` and `parent_state`, the result that it starts from."""
        ...

    def tell(self, state: Any, trial_id: str, result: tuple[Any, float]) -> Any:
        """Take the result of a trial and its score."""
        ...


class TreeQuestStrategy:
    """The search of one prompt by an algorithm of TreeQuest, such as AB-MCTS (arXiv:2503.04412).

        search.run(prompts, strategy=lambda: TreeQuestStrategy(treequest.ABMCTSA(), width=8))

    A wave asks for `width` trials at once, and all prompts' steps are drawn and scored together. A trial that
    would go on from a finished completion draws nothing: that completion and its score are told again.
    Repeated draws are trials of their own, though the tree merges them. NumPy's global generator, which the
    algorithms draw from, is seeded for each wave by seed, prompt and wave, and left as it was, so that the
    same seed gives the same tree.

    Args:
        algorithm: keeps no state itself, so that prompts may share it.
        width: trials of a wave, 1 or more; fewer where the algorithm queues fewer, such as the
            `samples_per_action` of `StandardMCTS`, and would leave out the results of more.
        seed: of what the algorithm draws.
        bounded: whether scores are in [0, 1], as the algorithms expect; others s are told as 1 / (1 + e⁻ˢ).

    Raises:
        ValueError: `width` is below 1.
        UserError: in a search, on a score outside [0, 1] that is not bounded after all.
    """

    def __init__(self, algorithm: AskTell, *, width: int = 8, seed: int = 0, bounded: bool = True) -> None:
        if width < 1:
            raise ValueError(f"width is {width}; a wave needs a trial or more")
        self.algorithm, self.width, self.seed, self.bounded = algorithm, width, seed, bounded
        self.state = algorithm.init_tree()
        self._waves = 0
        self._asked: dict[int, list[str]] = {}
        """Trials under way, by the node that they start from."""

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
                if queued is not None and self._asked:  # more would be trials of the same nodes
                    break
        return [Expansion(node, len(trials)) for node, trials in self._asked.items()]

    def take(self, tree: SearchTree, drawn: Sequence[tuple[Expansion, Sequence[int]]]) -> None:
        """See `rlhf_infer.search.strategies.Strategy`."""
        for expansion, children in drawn:
            for trial, child in zip(self._asked[expansion.node], children, strict=False):  # the budget's end
                self._tell(tree, trial, child)

    def _tell(self, tree: SearchTree, trial: str, node: int) -> None:
        score = tree.nodes[node].score
        assert score is not None  # of everything that was drawn
        if not self.bounded:
            score = 0.5 + math.tanh(score / 2) / 2
        if not 0 <= score <= 1:
            raise UserError(
                f"TreeQuest takes scores in [0, 1], and a completion has {score}; give a process reward "
                "model, or say bounded=False",
                code="score_out_of_range",
            )
        self.state = self.algorithm.tell(self.state, trial, (node, score))


def ab_mcts(width: int, seed: int, *, bounded: bool) -> TreeQuestStrategy:
    """TreeQuest's adaptive branching Monte Carlo tree search with its own settings (arXiv:2503.04412)."""
    return TreeQuestStrategy(_treequest().ABMCTSA(), width=width, seed=seed, bounded=bounded)


def check_installed() -> None:
    """Refuse what needs TreeQuest where that is missing.

    Raises:
        UserError: it is missing, or cannot be imported.
    """
    _treequest()


def _treequest() -> Any:
    try:
        return importlib.import_module("treequest")
    except ImportError as error:
        raise UserError(
            f'the search ab-mcts needs TreeQuest ({error}); pip install "rlhf-infer[treequest]"',
            code="missing_package",
            package="treequest",
        ) from error


def _queued(state: Any) -> int | None:
    """Results that an algorithm which queues its nodes takes now; None: as many as it is given."""
    queue = getattr(getattr(state, "trial_store", None), "next_nodes", None)
    return None if queue is None else sum(map(len, queue.values()))


@contextlib.contextmanager
def _seeded(text: str) -> Iterator[None]:
    """NumPy's global generator, seeded by a text within this context."""
    before = np.random.get_state()
    np.random.seed(zlib.crc32(text.encode()))
    try:
        yield
    finally:
        np.random.set_state(before)
