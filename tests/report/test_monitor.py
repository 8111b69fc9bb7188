"""`rlhf-report monitor` run as a user runs it."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlhf_data import RunFolder
from rlhf_report.cli import main
from rlhf_report.watch.server import serving


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    made = RunFolder.create("outputs/mine")
    made.write_config({"max_steps": 100})
    for step in range(1, 21):
        made.append_metrics({"step": step, "reward": step / 20, "kl": 4.0, "step_time": 0.5})
    return made


def test_without_a_terminal_it_shows_them_once(run: RunFolder) -> None:
    shown = CliRunner().invoke(main, ["monitor"])
    assert shown.exit_code == 0, shown.output
    assert "mine" in shown.output and "step 20 of 100" in shown.output and "kl is 4" in shown.output
    assert "reward" not in CliRunner().invoke(main, ["monitor", "outputs/mine", "--plot", "time"]).output


def test_a_value_that_is_gone_and_rows_without_steps_are_said(run: RunFolder) -> None:
    run.append_metrics({"step": 21, "reward": None, "loss": 0.25})
    shown = CliRunner().invoke(main, ["monitor"], env={"COLUMNS": "100"}).output
    [line] = [line for line in shown.splitlines() if "reward" in line and "▁" in line]
    assert "–" in line and "1 " not in line.partition("reward")[2]
    Path("log.jsonl").write_text('{"loss": 1.0}\n')
    assert "no step, by which" in CliRunner().invoke(main, ["monitor", "log.jsonl"]).output


def test_figures_are_written(run: RunFolder) -> None:
    shown = CliRunner().invoke(main, ["monitor", "outputs/mine", "--output", "png", "--once"])
    assert shown.exit_code == 0, shown.output
    assert Path("png/mine.png").read_bytes().startswith(b"\x89PNG")


def test_a_command_is_told_of_alerts_once(run: RunFolder) -> None:
    script = Path("tell.py")
    script.write_text(
        "import json, os\n"
        "told = {key: os.environ[key] for key in ('RLHF_RUN', 'RLHF_RULE', 'RLHF_STEP', 'RLHF_TEXT')}\n"
        "open('told.jsonl', 'a').write(json.dumps(told) + '\\n')\n"
    )
    run.write_results({})  # a finished run ends the following at once
    command = f"{sys.executable} {script}"
    shown = CliRunner().invoke(main, ["monitor", "outputs/mine", "--alert-command", command])
    assert shown.exit_code == 0, shown.output
    (told,) = [json.loads(line) for line in Path("told.jsonl").read_text().splitlines()]
    assert (told["RLHF_RULE"], told["RLHF_STEP"]) == ("kl", "20")


@pytest.mark.parametrize(
    "arguments",
    [
        ["nowhere"],
        ["--log-dir", "nowhere"],
        ["outputs/mine", "--alert-command", "no-such-program-here x"],
        ["outputs/mine", "--alert-command", "'"],
        ["outputs/mine", "--plot", "colours"],
    ],
)
def test_bad_input_is_one_sentence(run: RunFolder, arguments: list[str]) -> None:
    shown = CliRunner().invoke(main, ["monitor", *arguments])
    assert shown.exit_code == 2 and "Error:" in shown.output and "Traceback" not in shown.output


def get(port: int, host: str, path: str = "/") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", path, headers={"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_page_is_served_on_loopback_to_requests_that_mean_it() -> None:
    with serving(0) as server:
        server.page = "<p>hello</p>"
        host, port = server.server_address[:2]
        assert host == "127.0.0.1"
        assert get(int(port), f"127.0.0.1:{port}") == (200, "<p>hello</p>")
        assert get(int(port), f"localhost:{port}")[0] == 200
        assert get(int(port), f"evil.example:{port}")[0] == 403
        assert get(int(port), f"127.0.0.1:{port}", "/../etc/passwd")[0] == 404
        shown = CliRunner().invoke(main, ["monitor", "--serve", str(port)])
        assert shown.exit_code == 2


@pytest.mark.slow
def test_a_run_is_served_while_it_goes_on(run: RunFolder) -> None:
    command = [
        sys.executable,
        "-m",
        "rlhf_report",
        "monitor",
        "outputs/mine",
        "--serve",
        "0",
        "--interval",
        "0.2",
    ]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        found = re.search(r":(\d+)/", process.stdout.readline())
        assert found
        port, page = int(found[1]), ""
        while "Step 20 of 100" not in page:
            page = get(port, f"localhost:{port}")[1]
        run.append_metrics({"step": 21, "reward": 1.0, "kl": 4.0, "step_time": 0.5})
        while "Step 21 of 100" not in page:
            page = get(port, f"localhost:{port}")[1]
        process.terminate()
