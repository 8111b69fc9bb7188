"""The pages of the API reference: public names of the packages and their docstrings, read without importing.

Usage: python scripts/api_pages.py. Lists what is public and has no docstring, and fails if there is any.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path.parent for path in ROOT.glob("packages/*/src/rlhf_*/__init__.pyi"))
FOLDER = "docs/api"
_HEAD = """# API reference

What each package exports, from its docstrings. Importing a package is cheap: names are loaded when used.

| package | public names |
|---|---|"""


@dataclass(frozen=True)
class Symbol:
    """A name that a package exports, itself or in a module that it exports."""

    package: str
    room: str
    path: str
    definition: griffe.Object

    @property
    def summary(self) -> str:
        """The first sentence of the docstring, on one line."""
        docstring = self.definition.docstring
        paragraph = " ".join(docstring.value.partition("\n\n")[0].split()) if docstring else ""
        return paragraph.partition(". ")[0].rstrip(".").replace("|", "\\|")


@cache
def public_symbols() -> tuple[Symbol, ...]:
    """Every public name of every package."""
    loader = griffe.GriffeLoader(search_paths=[path.parent for path in SOURCES], allow_inspection=False)
    for path in SOURCES:
        loader.load(path.name)
    return tuple(
        symbol
        for path in SOURCES
        for module, name in _exports(path)
        for symbol in _symbols(path.name, module, loader.modules_collection[path.name].members[name])
    )


def missing_docstrings() -> list[str]:
    """Paths of the public names, and of their methods and properties, that no docstring describes."""
    found = []
    for symbol in public_symbols():
        if not symbol.definition.has_docstring:
            found.append(symbol.path)
        found += [
            f"{symbol.path}.{name}"
            for name, member in symbol.definition.members.items()
            if not name.startswith("_")
            and not member.is_alias
            and (member.is_function or "property" in member.labels)
            and not member.has_docstring
        ]
    return found


def api_pages() -> dict[str, str]:
    """The Markdown of every page by its path: an overview of each package, a page for each of its rooms."""
    rooms: dict[str, dict[str, list[Symbol]]] = defaultdict(lambda: defaultdict(list))
    for symbol in sorted(public_symbols(), key=lambda symbol: symbol.path):
        rooms[symbol.package][symbol.room].append(symbol)
    counts = {package: sum(map(len, symbols.values())) for package, symbols in rooms.items()}
    lines = [f"| [{package}]({package}/index.md) | {count} |" for package, count in counts.items()]
    pages = {f"{FOLDER}/index.md": "\n".join([_HEAD, *lines]) + "\n"}
    for package, symbols in rooms.items():
        pages[f"{FOLDER}/{package}/index.md"] = _overview(package, symbols)
        for room, members in sorted(symbols.items()):
            entries = "".join(f"\n::: {symbol.path}\n" for symbol in members)
            pages[f"{FOLDER}/{package}/{room}.md"] = f"# {package}: {room}\n{entries}"
    return pages


def api_navigation() -> list[object]:
    """The entries of the pages in the navigation."""
    first, *others = api_pages()
    navigation: dict[str, list[object]] = {}
    for page in others:
        package, name = page.removeprefix(f"{FOLDER}/").removesuffix(".md").split("/")
        navigation.setdefault(package, []).append(page if name == "index" else {name: page})
    return [first, *({package: pages} for package, pages in navigation.items())]


def _exports(source: Path) -> list[tuple[str, str]]:
    """The public names of a package with the modules that define them, as its `__init__` reads them too."""
    stub = (source / "__init__.pyi").read_text(encoding="utf-8")
    return sorted(re.findall(rf"^from {source.name}(\S*) import (\w+)", stub, re.M))


def _symbols(package: str, module: str, member: griffe.Object | griffe.Alias) -> Iterator[Symbol]:
    """The symbol of a public name, or those of a module: its `__all__`, or what its `__init__` imports."""
    target = _definition(member)
    if not isinstance(target, griffe.Module):
        yield Symbol(package, module.split(".")[1], f"{package}.{member.name}", target)
        return
    exported = [str(name) for name in target.exports or ()] or [
        name
        for name, each in sorted(target.members.items())
        if isinstance(each, griffe.Alias) and each.target_path.startswith(f"{target.path}.")
    ]
    for name in exported:
        if name not in target.members:
            raise SystemExit(f"{target.path}.{name}: give it an assignment of its own, and a docstring")
        definition = _definition(target.members[name])
        if not definition.is_module:
            yield Symbol(package, target.name, f"{target.path}.{name}", definition)


def _definition(member: griffe.Object | griffe.Alias) -> griffe.Object:
    return member.final_target if isinstance(member, griffe.Alias) else member


def _overview(package: str, rooms: dict[str, list[Symbol]]) -> str:
    lines = [
        f"# {package}",
        "",
        f"Public names of [{package.replace('_', '-')}]({_readme(package)}), by room.",
    ]
    for room, symbols in sorted(rooms.items()):
        lines += ["", f"## [{room}]({room}.md)", "", "| name | what it is |", "|---|---|"]
        for symbol in symbols:
            name = symbol.path.rpartition(".")[2]
            lines.append(f"| [`{name}`]({room}.md#{symbol.path}) | {symbol.summary} |")
    return "\n".join(lines) + "\n"


def _readme(package: str) -> str:
    return f"../../../packages/{package.replace('_', '-')}/README.md"


if __name__ == "__main__":
    missing = missing_docstrings()
    print(*missing, sep="\n", end="\n" if missing else "")
    sys.exit(1 if missing else 0)
