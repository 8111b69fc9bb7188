#!/usr/bin/env python3
"""Mutation test of the losses and advantages: change one operator or constant at a time, run their tests.

A mutant that no test notices is a survivor.  Survivors are allowed only where `docs/decisions.md` lists them
with the reason why they are equivalent; one that is not listed, or a listed one that is noticed, is an error.

Each mutant runs in a fork of this process, the changed module in place of the real one by an import hook.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import importlib.abc
import importlib.util
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "packages/rlhf-algos/src/rlhf_algos"
TESTS = ROOT / "tests/algos"
DECISIONS = ROOT / "docs/decisions.md"
HEADING = "## Mutants that survive"
TIMEOUT_S = 60
"""For one mutant; a loop that no longer ends counts as noticed."""

SWAPPED_OPERATORS: dict[type[ast.AST], tuple[Any, ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
SWAPPED_NAMES = {
    "abs": "square",
    "amax": "amin",
    "amin": "amax",
    "cumsum": "cumprod",
    "exp": "expm1",
    "expm1": "exp",
    "float32": "float64",
    "log": "log1p",
    "logsigmoid": "sigmoid",
    "max": "min",
    "maximum": "minimum",
    "mean": "sum",
    "min": "max",
    "minimum": "maximum",
    "new_zeros": "new_ones",
    "no_grad": "enable_grad",
    "relu": "abs",
    "sigmoid": "tanh",
    "sqrt": "square",
    "square": "abs",
    "std": "var",
    "sum": "mean",
    "zeros_like": "ones_like",
}
"""Functions, methods, types, keyword arguments and strings that are exchanged."""
NAMESPACES = ("F", "torch")


@dataclass(frozen=True)
class Mutant:
    """One change of one module."""

    path: Path
    where: str
    before: str
    after: str
    apply: Callable[[], ast.Module]
    """Changes the module's tree in place and returns it: to be called in a process of its own."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What the list of allowed survivors knows it by."""
        return self.where, self.before, self.after


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that take the place of `node`, one per mutant."""
    match node:
        case ast.Constant():
            yield from _constants(node.value)
        case ast.BinOp() | ast.BoolOp() | ast.Compare() | ast.UnaryOp():
            yield from _operators(node)
        case ast.Call():
            yield from _calls(node)
        case ast.Attribute(value, name) if name in SWAPPED_NAMES:
            yield ast.Attribute(value, SWAPPED_NAMES[name], node.ctx)
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.If(test, body, orelse):
            yield ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.Expr() | ast.Raise():
            yield ast.Pass()


def _constants(value: object) -> Iterator[ast.AST]:
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int | float):
        yield ast.Constant(value + 1)
        if value != 0:  # -1 for 0 is mostly another name for the same dimension
            yield ast.Constant(value - 1)
    elif isinstance(value, str):
        yield ast.Constant(SWAPPED_NAMES.get(value, f"not {value}"))


def _operators(node: ast.BinOp | ast.BoolOp | ast.Compare | ast.UnaryOp) -> Iterator[ast.AST]:
    match node:
        case ast.UnaryOp(_, operand):
            yield operand
        case ast.BinOp(left, operator, right):
            yield from (ast.BinOp(left, new(), right) for new in SWAPPED_OPERATORS.get(type(operator), ()))
        case ast.BoolOp(operator, values):
            yield from (ast.BoolOp(new(), values) for new in SWAPPED_OPERATORS[type(operator)])
        case ast.Compare(left, operators, right):
            for i, operator in enumerate(operators):
                for new in SWAPPED_OPERATORS.get(type(operator), ()):
                    yield ast.Compare(left, [*operators[:i], new(), *operators[i + 1 :]], right)


def _calls(node: ast.Call) -> Iterator[ast.AST]:
    function, arguments, keywords = node.func, node.args, node.keywords
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if isinstance(function, ast.Attribute):
        of_namespace = isinstance(function.value, ast.Name) and function.value.id in NAMESPACES
        if not of_namespace:
            yield function.value  # x.f(...) -> x
        elif len(arguments) == 1:
            yield arguments[0]  # torch.f(x) -> x
        if of_namespace and name == "where":
            yield ast.Call(function, [arguments[0], arguments[2], arguments[1]], keywords)
    elif name == "reversed":
        yield arguments[0]
    for i, keyword in enumerate(keywords):
        others = [*keywords[:i], *keywords[i + 1 :]]
        yield ast.Call(function, arguments, others)
        if keyword.arg in SWAPPED_NAMES:
            yield ast.Call(
                function, arguments, [*others, ast.keyword(SWAPPED_NAMES[keyword.arg], keyword.value)]
            )


def mutants_of(path: Path) -> list[Mutant]:
    """All mutants of a module, in the order of its source.

    Left alone: annotations, docstrings, messages of exceptions, `__all__` and the values of type aliases.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: list[Mutant] = []

    def visit(parent: ast.AST, scope: str, statement: ast.AST) -> None:
        for field, index, child in _children(parent):
            named = isinstance(child, ast.FunctionDef | ast.ClassDef)
            inner = f"{scope}.{child.name}".strip(".") if named else scope
            shown = child if isinstance(child, ast.stmt | ast.arguments) else statement
            if scope or named:
                for new in variants(child):
                    found.append(_mutant(path, tree, inner, shown, (parent, field, index, new)))
            visit(child, inner, shown)

    visit(tree, "", tree)
    return found


def _children(parent: ast.AST) -> Iterator[tuple[str, int | None, ast.AST]]:
    for field, value in ast.iter_fields(parent):
        if field in ("annotation", "returns") or isinstance(parent, ast.Raise | ast.JoinedStr):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if isinstance(child, ast.AST) and not docstring:
                yield field, index, child


def _mutant(
    path: Path, tree: ast.Module, scope: str, shown: ast.AST, change: tuple[ast.AST, str, int | None, ast.AST]
) -> Mutant:
    parent, field, index, new = change
    before = _headline(shown)
    old = _put(parent, field, index, new)
    # a replaced statement is itself what changed
    after = _headline(new if shown is old else shown)
    _put(parent, field, index, old)

    def apply() -> ast.Module:
        _put(parent, field, index, new)
        return ast.fix_missing_locations(tree)

    return Mutant(path, f"{path.relative_to(SOURCE).as_posix()}:{scope}", before, after, apply)


def _put(parent: ast.AST, field: str, index: int | None, new: ast.AST) -> ast.AST:
    """Put `new` in its place below `parent`; returns what was there."""
    if index is None:
        old = getattr(parent, field)
        setattr(parent, field, new)
        return old
    values = getattr(parent, field)
    old, values[index] = values[index], new
    return old


def _headline(node: ast.AST) -> str:
    """The source of a statement without the block below it."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    return " ".join(re.sub(r":\n.*", "", ast.unparse(node), flags=re.S).split())


def modules(only: str | None) -> list[Path]:
    """The modules under test."""
    paths = {
        "losses": [*sorted((SOURCE / "losses").glob("[!_]*.py")), SOURCE / "_flat.py"],
        "advantages": [SOURCE / "advantages.py"],
        "kl_control": [SOURCE / "kl_control.py"],
    }
    return [path for name, group in paths.items() if only in (None, name) for path in group]


def tests_of(path: Path) -> list[str]:
    """The tests of a module, those that are about nothing else first."""
    losses = sorted(
        set((TESTS / "losses").glob("test_losses*.py")) - set((TESTS / "losses").glob("test_losses*_trl.py"))
    )
    own = TESTS / "losses" / f"test_losses_{path.stem}.py"
    tests = {
        "advantages": [TESTS / "test_advantages.py"],
        "kl_control": [TESTS / "test_kl_control.py"],
        "_flat": [TESTS / "test_advantages.py", *losses],
    }
    return [str(test) for test in tests.get(path.stem, sorted(losses, key=lambda test: test != own))]


def survives(path: Path, apply: Callable[[], ast.Module] | None) -> bool:
    """Whether the tests of a module pass with a change in place, or without any."""
    child = os.fork()
    if child == 0:
        _run_tests(path, apply)
    return os.waitpid(child, 0)[1] == 0


def _run_tests(path: Path, apply: Callable[[], ast.Module] | None) -> None:
    import pytest

    signal.alarm(TIMEOUT_S)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    try:
        if apply is not None:
            sys.meta_path.insert(0, _Finder(path, apply()))
        arguments = ["-o", "addopts=--import-mode=importlib -m 'not slow'"]  # none of plugins, which are off
        arguments += ["-x", "-q", "--tb=no", "--assert=plain", "--noconftest", "-p", "no:cacheprovider"]
        code = pytest.main([*arguments, f"--rootdir={ROOT}", *tests_of(path)])
    except BaseException:  # the process ends here: whatever went wrong, the mutant was noticed
        code = 1
    os._exit(int(code))


class _Loader(SourceFileLoader):
    """Loads a module from a changed tree."""

    def __init__(self, name: str, path: Path, tree: ast.Module) -> None:
        super().__init__(name, str(path))
        self._code = compile(tree, str(path), "exec")

    def get_code(self, fullname: str) -> CodeType:
        return self._code


class _Finder(importlib.abc.MetaPathFinder):
    """Puts a changed module in the place of the real one."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        name = ".".join(["rlhf_algos", *path.relative_to(SOURCE).with_suffix("").parts])
        self._loader = _Loader(name, path, tree)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self._loader.name:
            return None
        return importlib.util.spec_from_loader(fullname, self._loader)


def allowed() -> dict[tuple[str, str, str], str]:
    """The survivors that `docs/decisions.md` lists, with the reason."""
    text = DECISIONS.read_text(encoding="utf-8")
    _, _, section = text.partition(f"\n{HEADING}\n")
    section = section.partition("\n## ")[0]
    rows = re.findall(r"^\| `(.+?)` \| `(.+?)` \| `(.+?)` \| (.+?) \|$", section, flags=re.M)
    return {(where, _unescape(before), _unescape(after)): reason for where, before, after, reason in rows}


def _unescape(cell: str) -> str:
    return cell.replace(r"\|", "|")


def table_row(key: tuple[str, str, str], reason: str) -> str:
    """A row of the list in `docs/decisions.md`."""
    where, before, after = (f"`{cell}`".replace("|", r"\|") for cell in key)
    return f"| {where} | {before} | {after} | {reason} |"


def _load_once() -> None:
    """Import here what every fork would import again, and keep it out of their garbage collection."""
    import torch

    importlib.import_module("pytest")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    torch.set_num_threads(1)
    torch.testing.assert_close(torch.zeros(1), torch.zeros(1))
    gc.collect()
    gc.freeze()


def run(mutants: list[Mutant]) -> dict[str, object]:
    """Try every mutant; gives the summary."""
    _load_once()
    started = time.monotonic()
    for path in dict.fromkeys(mutant.path for mutant in mutants):
        if not survives(path, None):
            raise SystemExit(f"the tests of {path.name} fail without any change: {' '.join(tests_of(path))}")
    survivors: list[Mutant] = []
    for done, mutant in enumerate(mutants, start=1):
        if survives(mutant.path, mutant.apply):
            survivors.append(mutant)
        seconds = time.monotonic() - started
        left = seconds / done * (len(mutants) - done)
        print(
            f"\r{done}/{len(mutants)} mutants, {len(survivors)} survive, {left:.0f} s left ",
            end="",
            file=sys.stderr,
        )
    print(file=sys.stderr)
    found, listed = {mutant.key for mutant in survivors}, allowed()
    tried = {mutant.where.partition(":")[0] for mutant in mutants}
    return {
        "mutants": len(mutants),
        "killed": len(mutants) - len(survivors),
        "equivalent": len([mutant for mutant in survivors if mutant.key in listed]),
        "survivors": sorted(table_row(key, "?") for key in found - set(listed)),
        "listed_but_killed": sorted(
            table_row(key, reason)
            for key, reason in listed.items()
            if key not in found and key[0].partition(":")[0] in tried
        ),
        "seconds": round(time.monotonic() - started),
    }


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0 when every survivor is listed and every listed mutant survives."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", choices=["losses", "advantages", "kl_control"], help="the modules to change (default: all)"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    options = parser.parse_args(arguments)
    mutants = [mutant for path in modules(options.only) for mutant in mutants_of(path)]
    if options.list:
        for mutant in mutants:
            print(f"{mutant.where}\n  - {mutant.before}\n  + {mutant.after}")
        return 0
    summary = run(mutants)
    print(json.dumps(summary, indent=2, ensure_ascii=False))
    return 1 if summary["survivors"] or summary["listed_but_killed"] else 0


if __name__ == "__main__":
    sys.exit(main())
