"""Megabytes that each package and extra downloads, by the sizes of files in uv.lock.

Usage: python scripts/install_sizes.py [--write]. Prints the table, or puts it into docs/installing.md. Needs
the uv.lock of the workspace, which `uv lock` makes.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from packaging import tags
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "installing.md"
_PYTHON = (3, 11)
_CUDA = re.compile(r"(nvidia|cuda)-.*|triton")
_CPU_TORCH_BYTES = 191_794_682
"""Of torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl, which is in no lock of ours."""


class Platform(NamedTuple):
    """What is installed on: what markers read, and tags of wheels, best first."""

    markers: dict[str, str]
    tags: list[tags.Tag]


def _platform(system: str, name: str, machine: str, platforms: list[str]) -> Platform:
    version = ".".join(map(str, _PYTHON))
    markers = {
        "sys_platform": system,
        "platform_system": name,
        "platform_machine": machine,
        "os_name": "posix",
    }
    markers |= {"python_version": version, "python_full_version": f"{version}.9", "extra": ""}
    markers |= {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
    found = [
        *tags.cpython_tags(_PYTHON, platforms=platforms),
        *tags.compatible_tags(_PYTHON, platforms=platforms),
    ]
    return Platform(markers, found)


LINUX = _platform(
    *("linux", "Linux", "x86_64"),
    [*(f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)), "manylinux2014_x86_64", "linux_x86_64"],
)
MAC = _platform(
    *("darwin", "Darwin", "arm64"),
    [f"macosx_{major}_0_{kind}" for major in range(15, 10, -1) for kind in ("arm64", "universal2")]
    + [f"macosx_10_{minor}_universal2" for minor in range(16, 8, -1)],
)


def packages() -> Iterator[tuple[str, str | None]]:
    """Every package, and each with one of its extras."""
    for path in sorted(ROOT.glob("packages/*/pyproject.toml")) + sorted(ROOT.glob("apps/*/pyproject.toml")):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        extras = sorted(project.get("optional-dependencies", {}))
        yield from ((project["name"], extra) for extra in (None, *extras))


def installed(package: str, extra: str | None, platform: Platform) -> set[tuple[str, str]]:
    """Name and version of what a package needs there, without this workspace's own."""
    command = ["uv", "export", "--quiet", "--frozen", "--no-header", "--no-annotate", "--no-hashes"]
    command += ["--no-emit-workspace", "--no-default-groups", "--package", package]
    command += ["--extra", extra] if extra else []
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    needed = [Requirement(line) for line in lines if line.strip()]
    return {
        (each.name, str(each.specifier).removeprefix("=="))
        for each in needed
        if each.marker is None or each.marker.evaluate(platform.markers)
    }


def download_bytes(package: dict[str, Any], platform: Platform) -> int:
    """Of the wheel that suits best there, or of the source."""
    wheels = {tag: file["size"] for file in package.get("wheels", []) for tag in _tags_of(file["url"])}
    sizes = [wheels[tag] for tag in platform.tags if tag in wheels]
    return sizes[0] if sizes else package["sdist"]["size"]


def _tags_of(url: str) -> frozenset[tags.Tag]:
    return parse_wheel_filename(url.rpartition("/")[2].replace("%2B", "+"))[3]


def table() -> str:
    """The table, in Markdown."""
    lock = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    locked = {(each["name"], each["version"]): each for each in lock["package"]}

    def megabytes(needed: set[tuple[str, str]], platform: Platform, *, cpu: bool = False) -> float:
        sizes = {each: download_bytes(locked[each], platform) for each in needed}
        grammar = any(name == "xgrammar" for name, _ in needed)
        if cpu:  # what torch needs for CUDA; xgrammar wants triton on its own
            kept = {
                each: size
                for each, size in sizes.items()
                if not _CUDA.fullmatch(each[0]) or (each[0] == "triton" and grammar)
            }
            sizes = {each: _CPU_TORCH_BYTES if each[0] == "torch" else size for each, size in kept.items()}
        return sum(sizes.values()) / 1e6

    lines = [
        "| package | other packages | Linux | Linux, torch for CPUs | Apple silicon |",
        "|---|---|---|---|---|",
    ]
    for name, group in itertools.groupby(packages(), key=lambda each: each[0]):
        for _, extra in group:
            linux, mac = (installed(name, extra, platform) for platform in (LINUX, MAC))
            sizes = megabytes(linux, LINUX), megabytes(linux, LINUX, cpu=True), megabytes(mac, MAC)
            what = f"`{name}[{extra}]`" if extra else f"**{name}**"
            lines.append(
                f"| {what} | {len(linux)} | " + " | ".join(f"{size:,.0f} MB" for size in sizes) + " |"
            )
    return "\n".join(lines)


def main() -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    found = table()
    if not options.write:
        print(found)
        return
    page = PAGE.read_text(encoding="utf-8")
    start, _, rest = page.partition("| package | other packages |")
    end = rest[rest.index("\n\n") :]
    PAGE.write_text(start + found + end, encoding="utf-8")


if __name__ == "__main__":
    main()
