"""Compares two exported lock files by what they install: versions of uv spell the same marker differently.

Usage: python scripts/same_lock.py COMMITTED FRESH. Prints each difference; exits with 1 where there is one.
With --constrain COMMITTED PYPROJECT it holds the resolution of a pyproject.toml to the committed pins.
"""

import itertools
import json
import sys
from collections import Counter
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
SYSTEMS = (("linux", "x86_64"), ("darwin", "arm64"))
IMPLEMENTATIONS = (("cpython", "CPython"), ("pypy", "PyPy"))


def read_lock(path: Path) -> list[tuple[Requirement, frozenset[str]]]:
    """The pinned packages of an exported lock file, each with the hashes of its files."""
    logical_lines = path.read_text().replace("\\\n", " ").splitlines()
    lines = [line.split() for line in logical_lines if line.strip() and not line.lstrip().startswith("#")]
    return [
        (
            Requirement(" ".join(word for word in words if not word.startswith("--hash="))),
            frozenset(word for word in words if word.startswith("--hash=")),
        )
        for words in lines
    ]


def installed(
    lock: list[tuple[Requirement, frozenset[str]]], environment: dict[str, str]
) -> dict[str, frozenset[str]]:
    """What a lock file installs in one environment: each `name==version` with its hashes."""
    return {
        f"{package.name}{package.specifier}": hashes
        for package, hashes in lock
        if package.marker is None or package.marker.evaluate(environment)
    }


def differences(committed: Path, fresh: Path) -> list[str]:
    """A line for each package that the two install differently, with the first environment that shows it."""
    locks = [read_lock(path) for path in (committed, fresh)]
    found: dict[str, str] = {}
    for python, (system, machine), (name, platform_name) in itertools.product(
        PYTHONS, SYSTEMS, IMPLEMENTATIONS
    ):
        environment = {key: str(value) for key, value in default_environment().items()} | {
            "python_version": python,
            "python_full_version": f"{python}.0",
            "sys_platform": system,
            "platform_machine": machine,
            "implementation_name": name,
            "platform_python_implementation": platform_name,
        }
        before, after = (installed(lock, environment) for lock in locks)
        for package in sorted(before.keys() | after.keys()):
            if before.get(package) != after.get(package):
                what = (
                    "only in" if package not in before or package not in after else "with other files than in"
                )
                where = committed if package in before else fresh
                found.setdefault(
                    package, f"{package} {what} {where} ({platform_name} {python}, {system} {machine})"
                )
    return list(found.values())


def constrain(lock: Path, pyproject: Path) -> None:
    """Appends the pins of a lock file to `tool.uv.constraint-dependencies` of a pyproject.toml."""
    packages = [package for package, _ in read_lock(lock)]
    versions = Counter(package.name for package in packages)
    # Only packages with several versions keep markers: with one, torch lacks wheels for Pythons to come.
    lines = (str(one) if versions[one.name] > 1 else f"{one.name}{one.specifier}" for one in packages)
    pins = "".join(f"    {json.dumps(line)},\n" for line in lines)
    opening = "constraint-dependencies = [\n"
    text = pyproject.read_text()
    if opening not in text:
        raise SystemExit(f"{pyproject}: no line {opening.strip()!r}")
    pyproject.write_text(text.replace(opening, opening + pins, 1))


if __name__ == "__main__":
    if sys.argv[1] == "--constrain":
        constrain(Path(sys.argv[2]), Path(sys.argv[3]))
        sys.exit()
    lines = differences(Path(sys.argv[1]), Path(sys.argv[2]))
    print(*lines, sep="\n", end="\n" if lines else "")
    sys.exit(1 if lines else 0)
