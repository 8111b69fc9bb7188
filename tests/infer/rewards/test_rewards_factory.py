"""Lines that name reward functions, the code they name, and what they refuse."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from raises import raises_error
from rlhf_infer.rewards import RewardFunctionFactory as Factory
from rlhf_infer.rewards import RewardFunctions, factory, rules, spec_parser

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
        if name.startswith(("my_", "pkg", "user_file_")):
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


def test_a_rule_s_options_are_read_off_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Keyword:
        word: str
        whole: bool = True

        def __call__(self, completions: list[str], **columns: Any) -> list[float]:
            return [float(self.word in text) for text in completions]

    monkeypatch.setitem(rules.RULES, "keyword", Keyword)
    assert from_spec("keyword:word=hey,whole=false") == Keyword("hey", whole=False)
    with raises_error("missing_option", option="word"):
        from_spec("keyword")
    with raises_error("invalid_option"):
        from_spec("keyword:word=hey,whole=no")
    with pytest.raises(TypeError):
        spec_parser.converter(list[str])


def test_a_judge_behind_an_api_has_every_setting_of_its_settings() -> None:
    judge: Any = from_spec('judge:url=http://h/v1,model=m,api_key_env=none,backoff=2,extra_body={"a": 1}')
    assert judge.judge.settings.backoff == 2 and judge.judge.settings.extra_body == {"a": 1}


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
    with raises_error("reward_not_made"):
        from_spec("my_rewards:Reward", scale=-1.0)


def test_a_file_is_run_once(code: Path) -> None:
    first, second = from_spec("my_rewards.py:Namespace.inner"), from_spec("my_rewards.py:Namespace.inner")
    assert first.__wrapped__ is second.__wrapped__  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("spec", "expected", "name"),
    [
        ("my_rewards:rewrd", "missing_attribute", "rewrd"),
        ("my_rewards:zzz", "missing_attribute", "zzz"),
        ("my_rewards:constant", "not_a_function", None),
        ("my_rewards.py", "missing_function_name", None),
        ("missing.py:reward", "file_not_found", None),
        ("missing_package:reward", "import_failed", None),
        ("pkg.broken:reward", "import_failed", None),
        ("pkg/broken.py:reward", "import_failed", None),
    ],
)
def test_code_that_is_not_there(code: Path, spec: str, expected: str, name: str | None) -> None:
    with raises_error(expected, name=name):
        from_spec(spec)


@pytest.mark.parametrize(
    ("spec", "code", "option"),
    [
        ("lenght", "unknown_reward", None),
        ("qqq", "unknown_reward", None),
        ("qqq.www", "unknown_reward", None),
        ("", "unknown_reward", None),
        ("length:targt=3", "unknown_option", "targt"),
        ("length:3", "unknown_option", "3"),
        ("length:target=3,target=4", "repeated_option", "target"),
        ("length:target", "unknown_option", "target"),
        ("length:target=3,qq=4", "unknown_option", "qq"),
        ("exact:column=gold,raed=whole", "unknown_option", "raed"),
        ("judge:url=http://h/v1,model=m,backof=2", "unknown_option", "backof"),
        ("remote:url=http://h,name=a,retires=9", "unknown_option", "retires"),
        ("length:target=x", "invalid_option", None),
        ("length", "invalid_value", None),
        ("model", "missing_option", "path"),
        ("remote:timeout_s=3", "missing_option", "url"),
        ("remote:url=http://h,headers=x", "invalid_option", None),
        ("constitutional:base=exact", "missing_option", "principles"),
        ("some/where/else", "model_not_found", None),
        ("http://", "invalid_url", None),
    ],
)
def test_refusals(spec: str, code: str, option: str | None) -> None:
    with raises_error(code, option=option):
        from_spec(spec)


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("length:qqq=3", ("no option 'qqq'; its options: ", "target")),
        ("length:targt=3", ("no option 'targt'", "did you mean target?")),
        ("length:target", ("expected option=value, got 'target'",)),
    ],
)
def test_an_unknown_option_is_refused_with_those_there_are(spec: str, parts: tuple[str, ...]) -> None:
    with raises_error("unknown_option") as caught:
        from_spec(spec)
    assert all(part in str(caught.value) for part in parts), caught.value
    assert "name=value" not in str(caught.value)  # `name` is an option of every rule


def test_unknown_options_in_python() -> None:
    with raises_error("unknown_option", option="targets"):
        from_spec("length", targets=3)
    with raises_error("unknown_option", option="timeout"):
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
