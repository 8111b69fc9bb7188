"""The pre-flight: what makes a run dead is found and said, what does not is passed over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rlhf_algos.online.preflight import Finding, ReferenceRewards, preflight, repeated_prompts
from rlhf_infer import Rollout
from rlhf_infer.rewards import RewardScores

EOS = 2


def rollouts(*groups: str) -> list[list[Rollout]]:
    """Groups of completions, one letter each: e ends with the end token, c is cut off, s ends with a stop
    string, n is nothing but the end token. All differ otherwise."""
    made, number = [], 10
    for group in groups:
        made.append([])
        for kind in group:
            number += 1
            ids = {"e": [number, EOS], "c": [number, 5], "s": [number, 6], "n": [EOS]}[kind]
            made[-1].append(Rollout((3, 4), ids, [-1.0] * len(ids), "length" if kind == "c" else "stop"))
    return made


def scores(*rows: Sequence[float]) -> RewardScores:
    rewards = torch.tensor(rows)
    names = tuple(f"f{i}" for i in range(len(rows)))
    return RewardScores(names, rewards, rewards.nan_to_num(0.0).sum(0))


def check(groups: Sequence[str], given: RewardScores, **options: Any) -> list[Finding]:
    options = {"eos_token_ids": [EOS], "max_completion_length": 16} | options
    return preflight(rollouts(*groups), given, **options)


def brief(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    return [(finding.level, finding.name) for finding in findings]


HEALTHY = scores([0.0, 1.0, 1.0, 0.0])


def test_a_healthy_run_has_no_findings() -> None:
    assert check(["ee", "ee"], HEALTHY) == []
    assert check(["ec", "ee"], HEALTHY) == []
    assert check(["es", "ss"], HEALTHY) == []


def test_all_completions_cut_off() -> None:
    varying, flat = scores([float(i) for i in range(64)]), scores([0.0] * 64)
    groups = ["c" * 8] * 8
    found = check(groups, varying)
    assert brief(found) == [("warning", "truncated"), ("warning", "no_eos")]
    assert found[0].text.startswith(
        "all 64 sampled completions were cut off at max_completion_length 16; nothing they end with can be "
        "rewarded, and ending is never learned: raise max_completion_length"
    )
    assert "(ids 2)" in found[1].text
    masked = check(groups, varying, mask_truncated=True)
    assert brief(masked) == [("error", "truncated"), ("error", "no_eos")]
    assert "all are masked, so that there is no loss" in masked[0].text
    assert brief(check(groups, flat)) == [
        ("error", "truncated"),
        ("error", "no_eos"),
        ("error", "zero_variance"),
    ]


def test_many_completions_cut_off() -> None:
    found = check(["ce", "cc"], HEALTHY)
    assert brief(found) == [("warning", "truncated")]
    assert found[0].text.startswith("3 of 4 sampled completions were cut off at max_completion_length 16")


def test_no_end_token_though_stop_strings_end_completions() -> None:
    found = check(["ss", "cs"], HEALTHY)
    assert brief(found) == [("warning", "no_eos")]
    assert found[0].text.startswith("none of 4 sampled completions has an end token (ids 2)")
    assert check(["ss", "se"], HEALTHY) == []
    # The end token counts at the end only.
    inside = [[Rollout((3,), [EOS, 7], [-1.0] * 2, "length"), Rollout((3,), [8, 7], [-1.0] * 2, "stop")]]
    found = preflight(inside, scores([0.0, 1.0]), eos_token_ids=[EOS], max_completion_length=2)
    assert "no_eos" in [finding.name for finding in found]


def test_empty_completions() -> None:
    found = check(["nn", "nn"], HEALTHY)
    assert brief(found) == [("error", "empty")]
    assert "the model ends at once" in found[0].text
    assert check(["nn", "ne"], HEALTHY) == []


def test_zero_variance_in_every_group() -> None:
    found = check(["ee", "ee"], scores([0.0, 0.0, 1.0, 1.0]))
    assert brief(found) == [("error", "zero_variance")]
    assert (
        "in each of the 2 groups of 2 sampled completions are equal (from 0 to 1 across prompts)"
        in found[0].text
    )
    everywhere = check(["ee", "ee"], scores([0.5] * 4))
    assert "(0.5 everywhere), so that every advantage is 0 and nothing is learned" in everywhere[0].text
    # PPO compares all completions: they differ.
    assert check(["ee", "ee"], scores([0.0, 0.0, 1.0, 1.0]), relative_to_group=False) == []
    flat = check(["ee", "ee"], scores([0.5] * 4), relative_to_group=False)
    assert brief(flat) == [("error", "zero_variance")] and "of all 4 sampled" in flat[0].text


def test_the_remedy_fits_the_reason() -> None:
    (single,) = check(["e", "e"], scores([0.0, 1.0]))
    assert "sample more than one completion a prompt" in single.text
    same = [[Rollout((3,), [7, EOS], [-1.0] * 2, "stop")] * 2] * 2
    (greedy,) = preflight(same, scores([0.0] * 4), eos_token_ids=[EOS], max_completion_length=4)
    assert "raise the temperature" in greedy.text
    (hard,) = check(["ee", "ee"], scores([0.0] * 4))
    assert "fine-tune the model on demonstrations first" in hard.text


def test_rounding_is_no_variance() -> None:
    for size in (1.0, 1000.0):
        noisy = scores([size, size * (1 + 2e-7), size, size])
        assert brief(check(["ee", "ee"], noisy)) == [("error", "zero_variance")]
    assert check(["ee", "ee"], scores([1.0, 1.001, 2.0, 2.001])) == []


def test_zero_variance_in_many_groups() -> None:
    found = check(["ee", "ee", "ee"], scores([0.0, 0.0, 1.0, 1.0, 0.0, 1.0]))
    assert brief(found) == [("warning", "zero_variance")]
    assert found[0].text.startswith("in 2 of 3 groups all 2 sampled completions have equal rewards")
    assert check(["ee", "ee", "ee"], scores([0.0, 1.0, 1.0, 1.0, 0.0, 1.0])) == []


def test_functions_that_say_nothing() -> None:
    nan = float("nan")
    found = check(["ee", "ee"], scores([0.0, 1.0, 1.0, 0.0], [nan] * 4, [nan, 0.5, 0.5, nan]))
    assert brief(found) == [("warning", "never_applicable"), ("warning", "constant_reward")]
    assert "reward function f1 returned None for all 4" in found[0].text
    assert "reward function f2 gave 0.5 to all 2" in found[1].text
    assert check(["ee", "ee"], scores([0.0, 1.0, 1.0, 0.0], [nan, 1.0, 2.0, nan])) == []


def references(own: Sequence[float], shuffled: Sequence[float]) -> ReferenceRewards:
    return ReferenceRewards(list(range(len(own))), torch.tensor(own), torch.tensor(shuffled))


SIX = ["ee"] * 6
SAMPLED = scores([0.0, 1.0] * 6)


def test_a_reward_that_prefers_wrong_answers() -> None:
    right, wrong = [1.0] * 6, [0.0] * 5 + [1.0]
    assert check(SIX, SAMPLED, references=references(right, wrong)) == []
    found = check(SIX, SAMPLED, references=references(wrong, right))
    assert brief(found) == [("error", "wrong_sign")]
    assert found[0].text.startswith(
        "reference answers are rewarded 0.1667 on average and other prompts' answers in their place 1; the "
        "reward prefers wrong answers"
    )
    # The sign of every reward turned round is found, whatever the rewards are.
    torch.manual_seed(0)
    own, shuffled = torch.randn(6) + 3, torch.randn(6)
    given = ReferenceRewards(list(range(6)), own, shuffled)
    turned = ReferenceRewards(list(range(6)), -own, -shuffled)
    low = scores((torch.arange(12.0) - 9).tolist())
    assert check(SIX, low, references=given) == []
    assert brief(check(SIX, low, references=turned)) == [("error", "wrong_sign")]


def test_references_below_what_the_model_writes() -> None:
    found = check(SIX, SAMPLED, references=references([0.1, 0.2] * 3, [0.0] * 6))
    assert brief(found) == [("warning", "wrong_sign")]
    assert "rewarded 0.15 on average, less than what the model writes, 0.5" in found[0].text
    # Groups are looked up: the references belong to the groups whose completions got 0 only.
    mixed = scores([0.0, 0.1] * 4 + [5.0, 6.0] * 4)
    low = references([1.0, 1.5, 1.0, 1.5], [0.0] * 4)
    assert check(["ee"] * 8, mixed, references=low) == []
    high = ReferenceRewards([4, 5, 6, 7], low.own, low.shuffled)
    assert brief(check(["ee"] * 8, mixed, references=high)) == [("warning", "wrong_sign")]


def test_chance_and_few_references_are_no_finding() -> None:
    # The difference is -0.1 on average, its standard error 0.43.
    noisy = references([1.0, 0.0, 1.0, 0.0, 1.4, 1.4], [0.0, 1.0, 0.5, 1.5, 1.4, 1.0])
    assert check(SIX, SAMPLED, references=noisy) == []
    assert check(SIX, SAMPLED, references=references([0.0] * 3, [1.0] * 3)) == []


def test_references_that_are_not_read() -> None:
    mean_is_low = scores([0.0, 0.0, 0.0, 1.0] * 3)
    groups = ReferenceRewards([0, 2, 4, 0], torch.zeros(4), torch.zeros(4))
    found = check(SIX, mean_is_low, references=groups)
    assert brief([f for f in found if f.name != "zero_variance"]) == [("warning", "references_unread")]
    best = ReferenceRewards([0, 2, 4, 0], torch.ones(4), torch.ones(4))
    assert "references_unread" not in [f.name for f in check(SIX, mean_is_low, references=best)]


def test_errors_come_first() -> None:
    given = scores([0.0] * 4, [float("nan")] * 4)
    found = check(["ce", "cc"], given)
    assert [f.level for f in found] == sorted((f.level for f in found), key=lambda level: level != "error")
    assert found[0].name == "zero_variance"


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"got sizes \[1, 2\]"):
        check(["ee", "e"], scores([0.0] * 3))
    with pytest.raises(ValueError, match=r"\(3,\) rewards"):
        check(["ee", "ee"], scores([0.0] * 3))
    with pytest.raises(ValueError, match="groups of one size"):
        check([], scores([0.0] * 3))


def test_a_budget_that_repeats_prompts() -> None:
    prompts = [tuple(range(100)), tuple(range(200, 300))]
    groups = [[Rollout(p, [k, 500 + k, EOS], [-1.0] * 3, "stop") for k in range(4)] for p in prompts]
    # Together 2 · (100 + 4 · 3) = 224 tokens; at most 110 hold a prompt and 3 completions, so each prompt is
    # computed twice: 424 tokens, 1.9 times as many. 112 hold a prompt and all of its completions.
    [found] = repeated_prompts(groups, 110)
    assert (found.level, found.name) == ("warning", "repeated_prompts")
    assert "1.9 times the tokens" in found.text and "raise it to 112" in found.text
    assert repeated_prompts(groups, 112) == repeated_prompts(groups, None) == []
