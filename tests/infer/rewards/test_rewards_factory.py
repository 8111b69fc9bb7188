"""Lines that name reward functions, the code they name, and what they refuse."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_data import UserError
from rlhf_infer.rewards import RewardFunctionFactory as Factory
from rlhf_infer.rewards import RewardFunctions, factory

from_spec = Factory.from_spec
PROMPTS: list[Any] = ["p", "q"]
COMPLETIONS: list[Any] = ["a", "bb"]

CODE = """
import dataclasses
from my_helpers import double

def reward(completions, **kwargs):
    return [double(len(c)) for c in completions]

async def later(completions, k=1.0):
    return [k * len(c) for c in completions]

@dataclasses.dataclass
class Reward:
    scale: float = 1.0
    seen: int = 0
    def __post_init__(self):
        if self.scale < 0:
            raise ValueError("scale is negative")
    def __call__(self, completions, **kwargs):
        self.seen += len(completions)
        return [self.scale * len(c) for c in completions]
    def state(self):
        return {"seen": self.seen}
    def load_state(self, state):
        self.seen = state["seen"]

class Namespace:
    @staticmethod
    def inner(prompts, completions):
        return [1.0, 2.0]

constant = 3
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with modules, as a console script sees it: not on Python's path."""
    (tmp_path / "my_rewards.py").write_text(CODE)
    (tmp_path / "my_helpers.py").write_text("def double(x):\n    return 2.0 * x\n")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "broken.py").write_text("raise RuntimeError('half done')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith(("my_", "pkg", "reward_file_")):
            del sys.modules[name]


def score(*functions: Any, **columns: Any) -> list[float]:
    together = RewardFunctions(functions)
    return together(PROMPTS, COMPLETIONS, completion_ids=[[1], [1, 1]], columns=columns).total.tolist()


def test_rules_and_their_options() -> None:
    length: Any = from_spec("length:minimum=2,maximum=4,unit=characters,scale=0.5")
    assert (length.minimum, length.maximum, length.unit, length.scale) == (2, 4, "characters", 0.5)
    assert (length.target, length.name) == (None, "length")
    assert from_spec("repetition:ngram_size=2,max_penalty=-0.5,name=rep") == Factory.repetition(
        2, -0.5, name="rep"
    )
    assert from_spec("non_empty") == Factory.non_empty()
    assert from_spec("number:tolerance=1e-3,read=marked") == Factory.number(tolerance=0.001, read="marked")
    assert from_spec("choice:column=key") == Factory.choice(column="key")
    assert from_spec("exact:") == from_spec("exact") == Factory.exact()
    assert from_spec("length", target=3) == from_spec("length:target=9", target=3) == Factory.length(target=3)
    assert score(from_spec("length:target=1"), from_spec("exact"), answer=["A", "c"]) == [2.0, 0.5]


def test_a_comma_in_a_value_stays() -> None:
    spec: Any = from_spec(r"format:pattern=a{1,3},b=c,name=x")
    assert (spec.pattern, spec.name) == (r"a{1,3},b=c", "x")
    assert spec(["aa,b=c", "aaaa,b=c"]) == [1.0, 0.0]


def test_every_rule_s_options_have_types_a_line_can_give() -> None:
    for name, builder in factory._builders({}).items():
        assert set(builder.options.values()) <= {str, int, float, dict, json.loads}, name
        if isinstance(builder.build, type):
            assert list(builder.options) == list(inspect.signature(builder.build).parameters)


@pytest.mark.parametrize(
    "spec",
    [
        "my_rewards:reward",
        "my_rewards.reward",
        "my_rewards.py:reward",
        "./my_rewards.py:reward",
        "ABSOLUTE/my_rewards.py:reward",
    ],
)
def test_code_of_the_working_directory(code: Path, spec: str) -> None:
    function = from_spec(spec.replace("ABSOLUTE", str(code)))
    assert function.name == "reward"  # type: ignore[attr-defined]
    assert score(function) == [2.0, 4.0]


def test_asynchronous_functions_classes_and_options(code: Path) -> None:
    assert score(from_spec("my_rewards:later")) == [1.0, 2.0]
    assert score(from_spec("my_rewards:later", k=3.0)) == [3.0, 6.0]
    assert score(from_spec("my_rewards:Namespace.inner")) == [1.0, 2.0]
    reward = from_spec("my_rewards:Reward", scale=5.0)
    together = RewardFunctions([reward])
    together(PROMPTS, COMPLETIONS, completion_ids=[[1], [1]], columns={})
    assert together.names == ("Reward",) and together.state() == {"Reward": {"seen": 2}}
    with pytest.raises(UserError, match=r"cannot be made \(ValueError: scale is negative\)"):
        from_spec("my_rewards:Reward", scale=-1.0)


def test_a_file_is_run_once(code: Path) -> None:
    first, second = from_spec("my_rewards.py:Namespace.inner"), from_spec("my_rewards.py:Namespace.inner")
    assert first.__wrapped__ is second.__wrapped__  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("my_rewards:rewrd", "my_rewards has no rewrd; did you mean reward"),
        ("my_rewards:zzz", "has no zzz; check the name"),
        ("my_rewards:constant", "is a int; expected a function"),
        ("my_rewards.py", "is a file; name the function in it, as in my_rewards.py:my_reward"),
        ("missing.py:reward", "there is no file missing.py"),
        ("missing_package:reward", "missing_package cannot be imported .*ModuleNotFoundError"),
        ("pkg.broken:reward", r"pkg.broken cannot be imported \(RuntimeError: half done\)"),
        ("pkg/broken.py:reward", r"pkg/broken.py cannot be imported \(RuntimeError: half done\)"),
    ],
)
def test_code_that_is_not_there(code: Path, spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_spec(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lenght", "'lenght' is unknown; did you mean length"),
        ("qqq", "'qqq' is unknown; expected a rule .length, .*pkg.mod:function.*URL"),
        ("qqq.www", "'qqq.www' is unknown; expected a rule"),
        ("", "'' is unknown"),
        ("length:targt=3", "has no option 'targt'; did you mean target.*minimum"),
        ("length:3", "has no option '3'; write length:name=value"),
        ("length:target=3,qq=4", "target is '3,qq=4', which is no int"),
        ("length:target=x", "reward length: target is 'x', which is no int"),
        ("length", "give either target, or minimum, maximum or both"),
        ("model", "reward model needs path; write model:path="),
        ("remote:timeout_s=3", "needs url"),
        ("remote:url=http://h,headers=x", "headers is 'x'.*Python only"),
        ("constitutional:base=exact", "needs principles"),
        ("some/where/else", "some/where/else does not exist"),
        ("http://", "reward URL"),
    ],
)
def test_refusals(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_spec(spec)


def test_unknown_options_in_python() -> None:
    with pytest.raises(UserError, match="has no option 'targets'; did you mean target"):
        from_spec("length", targets=3)
    with pytest.raises(UserError, match="has no option 'timeout'; did you mean timeout_s"):
        from_spec("http://h", timeout=3)


def test_urls() -> None:
    reward: Any = from_spec("http://localhost:1234/get_reward", timeout_s=3.0)
    assert (reward.protocol, reward.timeout_s, reward.name) == ("openrlhf", 3.0, "remote")
    line: Any = from_spec("remote:url=https://h/x,retries=7,protocol=openrlhf,timeout_s=0.5")
    assert (line.url, line.retry.retries, line.protocol, line.timeout_s) == (
        "https://h/x",
        7,
        "openrlhf",
        0.5,
    )


def test_functions_get_a_name() -> None:
    function = Factory.from_function(lambda completions: [1.0, 2.0])
    assert function.name == "<lambda>" and score(function) == [1.0, 2.0]  # type: ignore[attr-defined]


def test_rules_load_neither_transformers_nor_the_engines() -> None:
    code = (
        "import sys; from rlhf_infer.rewards import RewardFunctionFactory as F; F.from_spec('number')\n"
        "engine = 'rlhf_infer.engines.transformers_engine'\n"
        "print([m for m in ('transformers', 'rlhf_models', engine) if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
