"""The error of a reward function names the user's file and line."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from rlhf_data import UserError
from rlhf_infer import async_loop
from rlhf_infer.rewards import RewardFunctionFactory, RewardFunctions

TRL = "def boom(prompts, completions, **columns):\n    return [inner(text) for text in completions]\n"
VERL = "def boom(data_source, solution_str, ground_truth, extra_info=None):\n    return inner(solution_str)\n"
INNER = "\n\ndef inner(text):\n    import json\n\n    return json.loads(text)\n"


@pytest.mark.parametrize("body", [TRL, VERL])
def test_the_line_of_the_users_file_is_named(
    body: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(body + INNER)
    function = RewardFunctionFactory.from_spec(f"{path}:boom")
    line = (body + INNER).splitlines().index("    return json.loads(text)") + 1
    place = rf"JSONDecodeError.*mine.py:{line}\)"
    with caplog.at_level(logging.INFO), pytest.raises(UserError, match=place):
        RewardFunctions([function])(["p"], ["no JSON"], completion_ids=[[1]], columns={"answer": ["a"]})
    assert "Traceback" in caplog.text and "json.loads(text)" in caplog.text


SYNC = "def boom(prompts, completions):\n    sys.exit()\n"
ASYNC = "async def boom(prompts, completions):\n    sys.exit()\n"
TASK = (
    "async def inner():\n    sys.exit()\n\n\n"
    "async def boom(prompts, completions):\n    await asyncio.create_task(inner())\n"
)


@pytest.mark.parametrize(
    "body", [SYNC, ASYNC, TASK, VERL.replace("return inner(solution_str)", "sys.exit()")]
)
def test_a_function_that_exits_is_named_and_does_not_end_the_run(body: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    text = "import asyncio\nimport sys\n\n\n" + body
    path.write_text(text)
    function = RewardFunctionFactory.from_spec(f"{path}:boom")
    line = text.splitlines().index("    sys.exit()") + 1
    with pytest.raises(UserError, match=rf"reward function boom.*'b'.*SystemExit.*mine.py:{line}\)"):
        RewardFunctions([function])(["p"], ["b"], completion_ids=[[1]], columns={"answer": ["a"]})
    # The loop of asynchronous functions still runs.
    assert async_loop.submit(_one()).result() == 1


async def _one() -> int:
    return 1


@pytest.mark.parametrize(
    "body", ["sys.exit(0)\n", "class Boom:\n    def __init__(self):\n        sys.exit(0)\n"]
)
def test_a_module_or_class_that_exits_is_named(body: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import sys\n\n\n" + body)
    with pytest.raises(UserError, match=r"Boom.*SystemExit"):
        RewardFunctionFactory.from_spec(f"{path}:Boom")


def test_ctrl_c_passes_through() -> None:
    def interrupted(completions: Any) -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RewardFunctions([interrupted])(["p"], ["b"], completion_ids=[[1]], columns={})
