"""Monte Carlo tree search against trees worked by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest

from rlhf_infer import SamplingParams, SearchSettings, TreeSearch
from rlhf_infer.search.mcts import MCTS
from rlhf_infer.search.strategies import Expansion
from rlhf_infer.search.tree import ROOT, Draw, SearchTree
from scripted_search import Script, Table


def grown(tree: SearchTree, parent: int, scores: Sequence[float]) -> None:
    """Give a node children with these scores."""
    for i, score in enumerate(scores):
        child = tree.add(parent, Draw((10 * parent + i, 1), (-1.0, -1.0), "stop"), terminal=None, cut=False)
        tree.nodes[child].score = score
        tree.back_up(child, score)
        tree.nodes[child].prior = 1 / len(scores)


def test_visit_counts_equal_a_tree_worked_by_hand() -> None:
    # Two children are drawn of a node, no widening, c = 1, priors 1/2, one node a wave.
    #   wave 1: the root gets a (.9) and b (.2).           N(root)=2, Q(a)=.9, Q(b)=.2
    #   wave 2: a: .9 + ½√2/2 = 1.254, b: .2 + .354 = .554; a gets aa (.1) and ab (.3).
    #           N(root)=4, N(a)=3, Q(a) = (.9+.1+.3)/3 = .433
    #   wave 3: a: .433 + ½·2/4 = .683, b: .2 + ½·2/2 = .7; b gets ba (.5) and bb (.8).
    #           N(root)=6, N(b)=3, Q(b) = (.2+.5+.8)/3 = .5
    #   wave 4: a: .433 + ½√6/4 = .740, b: .5 + .306 = .806; below b, N(b)=3:
    #           ba: .5 + ½√3/2 = .933, bb: .8 + .433 = 1.233; bb gets bba (.7, the end) and bbb (.6).
    #           N(root)=8, N(b)=5, N(bb)=3.
    # With a minus before the bonus wave 3 would go below a: .433 - .25 against .2 - .5.
    steps = {">": ("a\n", "b\n"), ">a\n": ("a\n", "b\n"), ">b\n": ("a\n", "b\n"), ">b\nb\n": ("a\0", "b\n")}
    values = {"a\n": 0.9, "b\n": 0.2, "a\na\n": 0.1, "a\nb\n": 0.3, "b\na\n": 0.5, "b\nb\n": 0.8}
    values |= {"b\nb\na": 0.7, "b\nb\nb\n": 0.6}
    engine = Script(steps)
    settings = SearchSettings(
        width=2,
        branch=2,
        c=1.0,
        widen=False,
        backup="mean",
        budget_tokens=16,
        max_step_tokens=2,
        separator="\n",
    )
    search = TreeSearch(engine, Table(values), engine.tokenizer, settings, SamplingParams(20))
    [result] = search.run([">"])
    tree = result.tree
    read = engine.tokenizer.decode
    visits = {read(tree.completion_ids(n.id), skip_special_tokens=True): n.visits for n in tree.nodes}
    assert visits == {
        "": 8,
        "a\n": 3,
        "b\n": 5,
        "a\na\n": 1,
        "a\nb\n": 1,
        "b\na\n": 1,
        "b\nb\n": 3,
        "b\nb\na": 1,
        "b\nb\nb\n": 1,
    }
    assert tree.nodes[2].value == pytest.approx((0.2 + 0.5 + 0.8 + 0.7 + 0.6) / 5)
    assert tree.spent == 16 and result.best.text == "b\nb\na" and engine.calls == 4


def test_uct_prefers_what_was_visited_less() -> None:
    # Q + √(ln N / n): a: .6 + √(ln 4 / 3) = 1.280, b: .3 + √(ln 4 / 1) = 1.477. PUCT with c = 1 would take a:
    # .6 + ½·2/4 = .85 against .3 + ½·2/2 = .8.
    formulas: tuple[tuple[Literal["uct", "puct"], int], ...] = (("uct", 2), ("puct", 3))
    for formula, expected in formulas:
        tree = SearchTree(">", [1])
        grown(tree, ROOT, [0.6, 0.3])
        grown(tree, 1, [0.65, 0.55])
        settings = SearchSettings(width=2, branch=2, c=1.0, widen=False, formula=formula)
        [chosen] = MCTS(settings, bounded=True).choose(tree)
        assert chosen == Expansion(expected, 2)


def test_virtual_loss_spreads_a_wave() -> None:
    # c = ¼. Without loss both descents of a wave go below a: .9 + ⅛√6/(1+3) = .977 against .5 + ⅛√6/(1+1) =
    # .653. A draw under way below a counts as a visit of value 0: Q(a) = .9·3/4 = .675, the bonus
    # ⅛√7/(1+4) = .066, together .741 against .5 + ⅛√7/2 = .665: still a. With a loss of 3: Q(a) = .45, the
    # bonus ⅛√9/7 = .054, against .5 + ⅛√9/2 = .688: b.
    for loss, expected in ((0.0, [3, 4]), (1.0, [3, 4]), (3.0, [3, 2])):
        tree = SearchTree(">", [1])
        grown(tree, ROOT, [0.9, 0.5])
        grown(tree, 1, [0.9, 0.9])
        tree.nodes[ROOT].visits = 6
        settings = SearchSettings(width=4, branch=2, c=0.25, widen=False, virtual_loss=loss)
        assert [each.node for each in MCTS(settings, bounded=True).choose(tree)] == expected


def test_draws_under_way_count_as_visits_of_the_parent_too() -> None:
    # c = .47, one draw below a under way: a: .9·3/4 + .235·√7/5 = .799, b: .5 + .235·√7/2 = .811. With √6,
    # its visits alone, a: .790 against b: .788; with √5 a: .780 against .763.
    tree = SearchTree(">", [1])
    grown(tree, ROOT, [0.9, 0.5])
    grown(tree, 1, [0.9, 0.9])
    tree.nodes[ROOT].visits = 6
    settings = SearchSettings(width=4, branch=2, c=0.47, widen=False)
    assert [each.node for each in MCTS(settings, bounded=True).choose(tree)] == [3, 2]


def test_another_child_is_drawn_where_the_children_are_worse() -> None:
    # c = 1, after draws of .1 and .1: another one .1 + √2/(1+2) = .571, the first child .1 + ½√2/2 = .454.
    # After .9 and .1: another one .5 + .471 = .971, the first child .9 + .354 = 1.254.
    for scores, expected in (([0.1, 0.1], ROOT), ([0.9, 0.1], 1)):
        tree = SearchTree(">", [1])
        grown(tree, ROOT, scores)
        settings = SearchSettings(width=2, branch=2, c=1.0)
        assert MCTS(settings, bounded=True).choose(tree) == [Expansion(expected, 2)]


def test_unbounded_scores_are_scaled_by_the_tree() -> None:
    # Scores of 10 and 30 become 0 and 1; shifting or scaling all scores changes nothing.
    chosen = []
    for scale, shift in ((1.0, 0.0), (1000.0, -5e5)):
        tree = SearchTree(">", [1])
        grown(tree, ROOT, [scale * x + shift for x in (10.0, 30.0)])
        settings = SearchSettings(width=2, branch=2, widen=False)
        chosen.append(MCTS(settings, bounded=False).choose(tree))
    assert chosen[0] == chosen[1] == [Expansion(2, 2)]


def test_the_smallest_score_of_a_tree_is_a_quality_of_0() -> None:
    # Scores of 10, 24 and 30 become 0, .7 and 1. With one draw below the best under way its Q is 1·3/4, above
    # .7; bonuses are below .01. Were the scores shifted to 1, 1.7 and 2, it would be 1.5, below 1.7.
    tree = SearchTree(">", [1])
    grown(tree, ROOT, [30.0, 24.0, 10.0])
    grown(tree, 1, [30.0, 30.0])
    settings = SearchSettings(width=4, branch=2, c=0.01, widen=False)
    assert [each.node for each in MCTS(settings, bounded=False).choose(tree)] == [4, 5]


def test_a_finished_tree_gets_more_children_at_the_root() -> None:
    engine = Script({">": ("a\0", "b\0", "c\0", "d\0")})
    table = Table({"a": 0.1, "b": 0.2, "c": 0.9, "d": 0.3})
    settings = SearchSettings(width=2, branch=2, widen=False, budget_tokens=8, max_step_tokens=2)
    [result] = TreeSearch(engine, table, engine.tokenizer, settings, SamplingParams(4)).run([">"])
    assert [c.text for c in result.selected.candidates] == ["a", "b", "c", "d"]
    assert result.best.text == "c" and result.tree.spent == 8
