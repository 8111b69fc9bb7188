"""Algorithms of TreeQuest, run by us and by TreeQuest itself."""

from __future__ import annotations

import math
import random
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import treequest

from raises import raises_error
from rlhf_infer import (
    SamplingParams,
    SearchSettings,
    SearchTree,
    TreeQuestStrategy,
    TreeSearch,
    check_search_settings,
)
from scripted_search import Letters, Script, Table

_LENGTH = 3
"""Steps of a completion at most; each is a letter and a line break, and the end is an end token."""


def world(seed: int) -> tuple[dict[str, list[str]], dict[str, float]]:
    """What is drawn after every text, and the score of every text."""
    rng = random.Random(seed)
    steps, scores, texts = dict[str, list[str]](), dict[str, float](), [""]
    for depth in range(_LENGTH):
        for text in texts:
            last = depth == _LENGTH - 1
            steps[f">{text}"] = [
                letter + ("\0" if last or rng.random() < 0.2 else "\n") for letter in "abcde"
            ]
        texts = [t + step for t in texts for step in steps[f">{t}"] if step.endswith("\n")]
        scores |= {t[1:].rstrip("\0") + s.rstrip("\0"): rng.random() for t, own in steps.items() for s in own}
    return steps, scores


def by_us(algorithm: treequest.Algorithm, width: int, seed: int, draws: int) -> tuple[SearchTree, Script]:
    steps, scores = world(seed)
    engine = Script(steps)
    settings = SearchSettings(budget_tokens=2 * draws, max_step_tokens=2, separator="\n")
    search = TreeSearch(engine, Table(scores), engine.tokenizer, settings, SamplingParams(2 * _LENGTH))
    [result] = search.run([">"], strategy=lambda: TreeQuestStrategy(algorithm, width=width))
    return result.tree, engine


def texts_of(tree: SearchTree) -> list[str]:
    """The distinct completions in the order first drawn."""
    read = Letters().decode
    return [read(tree.completion_ids(node.id)) for node in tree.nodes[1:]]


def by_treequest(algorithm: treequest.Algorithm, seed: int, count: int) -> list[str]:
    """The first distinct completions of its own loop, which also generates nothing after an end."""
    steps, scores = world(seed)
    taken: dict[str, int] = {}
    found: list[str] = []

    def generate(parent: str | None) -> tuple[str, float]:
        text = parent or ""
        if not text.endswith("\0"):
            number = taken[text] = taken.get(text, -1) + 1
            own = steps[f">{text}"]
            text += own[min(number, len(own) - 1)]
            found.append(text)
        return text, scores[text.rstrip("\0")]

    state = algorithm.init_tree()
    while len(set(found)) < count:
        state = algorithm.step(state, {"step": generate})
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["mcts", "thoughts"])
def test_one_trial_at_a_time_goes_where_treequest_goes(kind: str, seed: int) -> None:
    mcts = treequest.StandardMCTS(samples_per_action=2)
    algorithm = mcts if kind == "mcts" else treequest.TreeOfThoughtsBFSAlgo(breadth_limit=2, size_limit=3)
    tree, _ = by_us(algorithm, 1, seed, draws=20)
    assert texts_of(tree) == by_treequest(algorithm, seed, len(tree.nodes) - 1)


def test_a_wave_is_drawn_in_one_call() -> None:
    tree, engine = by_us(treequest.ABMCTSA(), 4, 0, draws=16)
    assert tree.spent == 32
    assert engine.calls < 16, "trials that start from a node together are drawn together"


def test_the_seed_gives_the_tree_and_numpy_is_left_alone() -> None:
    np.random.seed(5)
    expected = np.random.random()
    np.random.seed(5)
    first, second = (by_us(treequest.ABMCTSA(), 4, 1, draws=16)[0] for _ in range(2))
    assert list(first.lines()) == list(second.lines())
    assert np.random.random() == expected
    steps, scores = world(1)
    settings = SearchSettings(budget_tokens=32, max_step_tokens=2, separator="\n")
    search = TreeSearch(Script(steps), Table(scores), Letters(), settings, SamplingParams(2 * _LENGTH))

    def make() -> TreeQuestStrategy:
        return TreeQuestStrategy(treequest.ABMCTSA(), width=4, seed=1)

    [other] = search.run([">"], strategy=make)
    assert list(other.tree.lines()) != list(first.lines())
    settings = settings.model_copy(update={"budget_tokens": 16})
    short = TreeSearch(Script(steps), Table(scores), Letters(), settings, SamplingParams(2 * _LENGTH))
    [part] = short.run([">"], strategy=make)
    [resumed] = search.run([">"], strategy=make, resume=[part.tree])
    assert list(resumed.tree.lines()) == list(other.tree.lines())


@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_no_trials_beyond_the_queue_are_run(seed: int, width: int, caplog: pytest.LogCaptureFixture) -> None:
    """TreeQuest hands out more trials than its queue accepts results, and raises on the surplus results."""
    tree, _ = by_us(treequest.TreeOfThoughtsBFSAlgo(breadth_limit=2, size_limit=3), width, seed, draws=20)
    assert tree.finished and not caplog.records


def test_a_strategy_that_draws_nothing_is_refused() -> None:
    class Nothing:
        def choose(self, tree: SearchTree) -> list[Any]:
            return []

        def take(self, tree: SearchTree, drawn: Any) -> None:
            raise AssertionError("nothing was drawn")

    steps, scores = world(0)
    search = TreeSearch(Script(steps), Table(scores), Letters(), SearchSettings(), SamplingParams(6))
    with raises_error("nothing_drawn"):
        search.run([">"], strategy=Nothing)


@pytest.mark.parametrize("width", [0, -1])
def test_a_wave_of_no_trials_is_refused(width: int) -> None:
    with pytest.raises(ValueError, match="width"):
        TreeQuestStrategy(treequest.ABMCTSA(), width=width)


def test_a_score_outside_0_to_1_is_refused() -> None:
    steps, scores = world(0)
    settings = SearchSettings(budget_tokens=32, max_step_tokens=2, separator="\n")
    table = Table({text: score + 1 for text, score in scores.items()})
    search = TreeSearch(Script(steps), table, Letters(), settings, SamplingParams(2 * _LENGTH))
    with raises_error("score_out_of_range"):
        search.run([">"], strategy=lambda: TreeQuestStrategy(treequest.ABMCTSA(), width=2))


def test_unbounded_scores_go_through_a_sigmoid() -> None:
    """sigmoid(ln 3) = 3 / (3 + 1) = .75, and sigmoid(-1000) = 0."""
    scores = []

    class One:
        def init_tree(self) -> None:
            return None

        def ask_batch(self, state: None, batch_size: int, actions: list[str]) -> tuple[None, list[Any]]:
            return None, [SimpleNamespace(trial_id=str(i), parent_state=None) for i in range(batch_size)]

        def tell(self, state: None, trial_id: str, result: tuple[Any, float]) -> None:
            scores.append(result[1])

    table = Table({"a\n": math.log(3), "b\n": -1000.0})
    table.bounded = False
    settings = SearchSettings(budget_tokens=4, max_step_tokens=2, separator="\n")
    search = TreeSearch(
        Script({">": ["a\n", "b\n"]}), table, Letters(), settings, SamplingParams(2 * _LENGTH)
    )
    search.run([">"], strategy=lambda: TreeQuestStrategy(One(), width=2, bounded=False))
    assert scores == pytest.approx([0.75, 0.0])


def test_ab_mcts_is_refused_where_treequest_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SearchSettings(strategy="ab-mcts")
    check_search_settings(settings, SamplingParams(8), None)
    monkeypatch.setitem(sys.modules, "treequest", None)  # what Python does with a package that is not there
    with raises_error("missing_package", package="treequest"):
        check_search_settings(settings, SamplingParams(8), None)
