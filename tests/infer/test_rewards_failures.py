"""The error of a reward function names the user's file and line."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rlhf_data import UserError
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
