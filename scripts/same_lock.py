"""Compares two exported lock files by what they install: versions of uv spell the same marker differently.

Usage: python scripts/same_lock.py COMMITTED FRESH. Prints each difference; exits with 1 where there is one.
"""

import itertools
import sys
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


if __name__ == "__main__":
    lines = differences(Path(sys.argv[1]), Path(sys.argv[2]))
    print(*lines, sep="\n", end="\n" if lines else "")
    sys.exit(1 if lines else 0)
