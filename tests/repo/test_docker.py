"""Dockerfile and compose files name what is there: files, commands with their options, the health route."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import click
import pytest
import yaml

from rlhf_serve.http import app
from rlhf_serve.settings import ServeSettings

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"
COMPOSE = [ROOT / "compose.yaml", ROOT / "configs/kuberay/compose.yaml"]
KNOWN = {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "ENV", "USER", "VOLUME", "EXPOSE", "HEALTHCHECK", "CMD"}
COMMANDS = {"rlhf-serve": "rlhf_serve.cli.main", "rlhf-train": "rlhf_train.cli"}


@pytest.fixture(scope="module")
def steps() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docker_steps", ROOT / "scripts" / "docker_steps.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _check_options(words: list[str]) -> None:
    """Every option of a command line is one of its command's."""
    name, *rest = words
    command: click.Command = importlib.import_module(COMMANDS[name]).main
    context = click.Context(command)
    if isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        found = command.get_command(context, rest.pop(0))
        assert found is not None
        command = found
    known = {option for parameter in command.params for option in parameter.opts}
    given = [word.partition("=")[0] for word in rest if word.startswith("--")]
    assert set(given) <= known, words


def _services(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())["services"]


def _words(command: str | list[str]) -> list[str]:
    return command if isinstance(command, list) else command.split()


def test_every_instruction_is_one_of_docker_s(steps: ModuleType):
    assert {name for name, _ in steps.instructions(DOCKERFILE)} <= KNOWN
    stages = [rest.split() for name, rest in steps.instructions(DOCKERFILE) if name == "FROM"]
    assert all(re.fullmatch(r"python:3\.\d+-slim", stage[0]) for stage in stages)
    taken = re.findall(r"--from=(\w+)", DOCKERFILE.read_text())
    assert set(taken) <= {stage[2] for stage in stages if len(stage) == 3}


def test_what_is_copied_is_there_and_not_ignored(steps: ModuleType):
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    sources = steps.copied(DOCKERFILE)
    assert sorted(source.rstrip("/") for source in sources) == sorted(kept)
    assert all((ROOT / source).exists() for source in sources)


def test_the_image_s_user_is_not_root_and_runs_a_command_with_its_options(steps: ModuleType):
    given = dict(steps.instructions(DOCKERFILE))
    assert given["USER"].split(":")[0] == str(steps.USER)
    _check_options(steps.command(DOCKERFILE, "CMD"))
    for path in steps.WRITABLE[1:]:
        assert path in given["VOLUME"]


def test_the_health_check_asks_a_route_that_needs_no_key(steps: ModuleType):
    url = re.search(r"http://[^'\"]+", steps.command(DOCKERFILE, "HEALTHCHECK")[-1])
    assert url is not None
    parts = urlsplit(url[0])
    assert parts.path in app._OPEN
    served = Mock(model="m", rewards=(), examples=())
    served.service.backend.name, served.service.backend.max_model_len = "b", 8
    served.service.backend.memory.return_value = {}
    routes = {route.path for route in app.create_app(served, ServeSettings()).routes}  # pyright: ignore
    assert parts.path in routes
    command = steps.command(DOCKERFILE, "CMD")
    assert (
        command[command.index("--port") + 1]
        == str(parts.port)
        == dict(steps.instructions(DOCKERFILE))["EXPOSE"]
    )


def test_torch_for_cpus_is_the_locked_version_with_a_hash(steps: ModuleType):
    locked = re.search(r"^torch==(\S+)", (ROOT / "requirements.lock").read_text(), re.M)
    assert locked is not None
    wanted = rf"torch=={re.escape(locked[1])}\+cpu --hash=sha256:[0-9a-f]{{64}}"
    assert re.fullmatch(wanted, steps.settings(DOCKERFILE)["TORCH_CPU"])


def test_the_extras_that_are_named_exist():
    for page in (DOCKERFILE, ROOT / "docs" / "docker.md"):
        for package, extra in re.findall(r"(rlhf_\w+)\[(\w+)\]", page.read_text()):
            (folder,) = ROOT.glob(f"*/{package.replace('_', '-')}")
            project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
            assert extra in project["optional-dependencies"]


def test_the_installing_script_is_a_program_that_parses():
    script = ROOT / "scripts" / "docker_install.sh"
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.parent.name)
def test_services_run_commands_with_their_options(path: Path):
    for service in _services(path).values():
        words = _words(service["command"])
        assert words[0] in (*COMMANDS, "ray", "sh")
        for call in re.findall(r"(?:rlhf-\w+)[^&]*", " ".join(words)):
            _check_options(call.strip(' "').split())


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.parent.name)
def test_what_services_name_is_declared(path: Path):
    whole = yaml.safe_load(path.read_text())
    for service in whole["services"].values():
        assert set(service.get("depends_on", {})) <= whole["services"].keys()
        assert set(service.get("secrets", [])) <= whole.get("secrets", {}).keys()
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert source.startswith("./") or source in whole["volumes"]
    for name, conditions in ((n, s.get("depends_on", {})) for n, s in whole["services"].items()):
        for other, how in conditions.items():
            if how["condition"] == "service_healthy":
                assert "healthcheck" in whole["services"][other], name


def test_the_served_service_is_closed_up(steps: ModuleType):
    service = _services(COMPOSE[0])["serve"]
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert any(word.startswith("--api-keys-file=") for word in service["command"])
    mounted = {volume.split(":")[1] for volume in service["volumes"]} | {
        place.split(":")[0] for place in service["tmpfs"]
    }
    assert set(steps.WRITABLE) <= mounted
    assert ServeSettings().drain_timeout_s < int(service["stop_grace_period"].rstrip("s"))
