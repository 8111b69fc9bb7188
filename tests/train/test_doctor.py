"""`rlhf-train doctor` on real faults: each is named, and the exit code says so."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlhf_train.commands.doctor import examine

PROGRAM = Path(sys.executable).with_name("rlhf-train")


def doctor(*arguments: str, before: str = "", **environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code and findings by name; `before` are words of the shell that come first."""
    command = f"{before} exec {PROGRAM} doctor --json {' '.join(arguments)}"
    run = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert run.stdout, run.stderr
    return run.returncode, {finding["name"]: finding for finding in json.loads(run.stdout)}


def problems(found: dict[str, dict[str, Any]]) -> set[str]:
    return {name for name, finding in found.items() if finding["status"] == "problem"}


@pytest.mark.slow
def test_a_machine_that_can_train_has_no_problem() -> None:
    code, found = doctor()
    assert code == 0 and not problems(found)
    assert {"Python", "packages", "torch", "memory", "working directory", "open files"} <= found.keys()
    assert all(finding["advice"] for finding in found.values() if finding["status"] == "problem")


def test_what_would_end_a_run_is_a_problem(tmp_path: Path) -> None:
    """A taken port, few open files, a cache that cannot be written, a requirement that is not met."""
    made = tmp_path / "rlhf_odd-1.0.dist-info"
    made.mkdir()
    needs = "Requires-Dist: torch>=99\nRequires-Dist: nowhere-at-all\nRequires-Dist: other; extra == 'more'\n"
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rlhf-odd\nVersion: 1.0\n{needs}")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        more = {"HF_HOME": "/proc/nothing/here", "PYTHONPATH": str(tmp_path)}
        code, found = doctor(f"--port={port}", before="ulimit -n 256;", **more)
    assert code == 2
    assert problems(found) == {f"port {port}", "open files", "cache of the hub", "requirements"}
    wrong = found["requirements"]["found"]
    assert "torch" in wrong and "nowhere-at-all" in wrong and "other" not in wrong
    assert all(found[name]["advice"] for name in problems(found))


def test_a_port_whose_last_server_has_just_ended_is_free() -> None:
    """The side that closes first keeps the port in TIME_WAIT, which keeps no server from listening."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()
            assert client.recv(1) == b""
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    (finding,) = [each for each in examine(port) if each.name == f"port {port}"]
    assert (finding.status, finding.found) == ("ok", "free")


def test_a_cache_that_is_a_file_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf_train.cli import main

    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    run = CliRunner().invoke(main, ["doctor", "--json"])
    found = {finding["name"]: finding for finding in json.loads(run.stdout)}
    assert run.exit_code == 2 and problems(found) == {"cache of the hub"}


def test_a_check_that_fails_in_itself_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open')\n")
    code, found = doctor(PYTHONPATH=str(tmp_path))
    assert code == 2 and problems(found) == {"torch"} and "libcudart" in found["torch"]["found"]
