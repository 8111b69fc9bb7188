"""How many source files a change touches, as CONTRIBUTING.md promises; lists of exports (`.pyi`) aside."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for part in ("apps", "packages") for path in ROOT.glob(f"{part}/*/src/**/*.py"))
ALGOS = ROOT / "packages" / "rlhf-algos" / "src" / "rlhf_algos"


def test_a_preference_method_is_three_files() -> None:
    named = [path for path in SOURCES if "orpo" in path.read_text(encoding="utf-8").lower()]
    loss, trainer, entry = "losses/preference.py", "offline/orpo.py", "jobs/methods.py"
    assert set(named) == {ALGOS / loss, ALGOS / trainer, ALGOS / entry}


def test_methods_are_listed_in_one_place() -> None:
    """The commands, their help, model cards and TRL's trainers follow from `METHODS`."""
    pattern = re.compile(r"\b(dpo|simpo|kto)\b")  # the other names are words of their own, or stages of RLHF
    listing = [path for path in SOURCES if len(set(pattern.findall(path.read_text(encoding="utf-8")))) == 3]
    assert listing == [ALGOS / "jobs" / "methods.py"]


@dataclass(frozen=True)
class Shout:
    """How many times a completion says a word."""

    word: str
    name: str = "shout"

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        return [float(str(completion).count(self.word)) for completion in completions]


@pytest.mark.parametrize("module", ["rules", "answers.verifiable"])
def test_a_reward_rule_is_one_file(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """A class and a line in `RULES`: the command line reads its options off the class."""
    import importlib

    from rlhf_data import UserError
    from rlhf_infer import RewardFunctionFactory

    rules = importlib.import_module(f"rlhf_infer.rewards.{module}")
    monkeypatch.setitem(rules.RULES, "shout", Shout)
    made = RewardFunctionFactory.from_spec("shout:word=hey")
    assert made == Shout("hey")
    with pytest.raises(UserError, match="shout"):
        RewardFunctionFactory.from_spec("shout:ward=hey")


def test_a_merge_method_is_one_file() -> None:
    named = [path for path in SOURCES if "nearswap" in path.read_text(encoding="utf-8")]
    assert [path.name for path in named] == ["nearswap.py"]


def test_a_route_is_written_in_one_file() -> None:
    paths = [path for path in SOURCES if "rlhf_serve/http" in path.as_posix()]
    texts = [path.read_text(encoding="utf-8") for path in paths]
    for route in ("/v1/score", "/get_reward", "/v1/models", "/v1/chat/completions"):
        assert sum(f'"{route}"' in text for text in texts) == 1, route
