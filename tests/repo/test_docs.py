"""The documents are true: links lead somewhere, commands and settings exist, ratios are those measured."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from rlhf_algos import METHODS
from rlhf_algos.jobs.rlhf_config import STAGES, RLHFConfig
from rlhf_algos.pipeline import PipelineConfig
from rlhf_data import UserError, apply_overrides
from rlhf_infer import RuleJudge
from rlhf_infer.rewards import RewardFunctionFactory, load_principles
from rlhf_infer.rewards.factory import all_rules
from rlhf_merge import MergeConfig, MergeError
from rlhf_minmax import MinMaxConfig

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/*.md",
        "packages/*/CHANGELOG.md",
        "packages/*/README.md",
        "apps/*/CHANGELOG.md",
        "apps/*/README.md",
        "benchmarks/*.md",
        "configs/*.md",
        "docs/methods/*.md",
        "docs/tutorials/*.md",
    )
    for path in ROOT.glob(pattern)
)
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def code_blocks(page: Path, language: str) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    return [block for tag, block in blocks if tag == language]


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page: Path, program: str = r"(?:rlhf-train|-m rlhf_train)") -> list[tuple[str, list[str]]]:
    """Verb and arguments of every call of a program in the page's plain code blocks, `--help` aside."""
    lines = [line for block in code_blocks(page, "") for line in block.splitlines()]
    found = [re.search(rf"{program} ([\w-]+)(.*)", line) for line in lines]
    return [(match[1], shlex.split(match[2])) for match in found if match and "--help" not in match[2]]


def refusal(method: str, values: dict[str, Any], where: str) -> str | None:
    """What is no setting of a method, in a sentence."""
    try:
        if "method" in values:
            MergeConfig.from_dict(values, where)
        elif method == "minmax":
            MinMaxConfig.from_dict(values, where=where)
        elif method == "rlhf":
            RLHFConfig.from_dict(values, where=where)
            for stage in STAGES:
                METHODS[stage].resolve(values.get(stage, {}), where=stage)
        else:
            METHODS[method].resolve(values, where=where)
    except (UserError, MergeError) as error:
        return str(error)
    return None


@EACH_PAGE
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if re.match(r"https?:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name} links to {link}, which does not exist"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}, a missing heading"


def parsed(main: click.Group, verb: str, arguments: list[str]) -> click.Context:
    """A command's parsed options.

    Within its group, because click makes a command's help option once, from the context that asks first."""
    with main.make_context("main", [verb]) as group:
        command = main.get_command(group, verb)
        assert command is not None
        return command.make_context(verb, arguments, parent=group)


@EACH_PAGE
def test_commands_use_options_and_settings_that_exist(page: Path) -> None:
    from rlhf_train.cli import main
    from rlhf_train.comparison.plan import ComparisonPlan

    for method, arguments in commands(page):
        if "--method-module" in (method, *arguments):  # tests/repo/test_contributing.py runs those
            continue
        options = parsed(main, method, arguments).params
        if method == "compare":
            if options["resume"] is None:
                ComparisonPlan.of_options(options)
            continue
        if method == "pipeline":
            assert options["resume"] or (ROOT / options["config"]).is_file()
            continue
        if "overrides" not in options:  # a command without settings
            continue
        values = apply_overrides({}, options["overrides"]) | settings_of(method, options)
        assert refusal(method, values, " ".join(arguments)) is None
        for source in options.get("reward", ()):
            rule, _, _ = source.partition(":")
            if rule in all_rules():
                RewardFunctionFactory.from_spec(source)


def settings_of(method: str, options: dict[str, Any]) -> dict[str, Any]:
    """The settings that a command's own options stand for, as far as they decide what is valid."""
    names = {"model": "model_name_or_path"}
    if method == "minmax":
        return {}
    if method == "rlhf":
        names |= {"stage": "stages", "reward_model": "reward_model", "data": "data"}
    elif METHODS[method].online:
        names |= {"train_data": "train_data", "reward": "reward"}
    return {key: options[name] for name, key in names.items() if options[name]}


@EACH_PAGE
def test_merge_commands_use_options_that_exist(page: Path) -> None:
    from rlhf_merge.cli.main import main

    for verb, arguments in commands(page, "rlhf-merge"):
        assert parsed(main, verb, arguments).args == []


@EACH_PAGE
def test_report_commands_use_options_that_exist(page: Path) -> None:
    from rlhf_report.cli import main

    for verb, arguments in commands(page, r"^(?:uv run )?rlhf-report"):
        assert parsed(main, verb, arguments).args == []


@EACH_PAGE
def test_config_examples_are_valid(page: Path, tmp_path: Path) -> None:
    for block in code_blocks(page, "yaml"):
        named = re.match(r"# (\w+)\.yaml", block)
        if named and named[1] == "principles":
            file = tmp_path / "principles.yaml"
            file.write_text(block, encoding="utf-8")
            assert load_principles(file, judge=RuleJudge())
            continue
        if named and named[1] == "pipeline":
            PipelineConfig.from_dict(yaml.safe_load(block), where=page.name)
            continue
        method = named[1] if named and named[1] in (*METHODS, "rlhf") else "minmax"
        assert refusal(method, yaml.safe_load(block), page.name) is None


@EACH_PAGE
def test_python_examples_import_public_names(page: Path) -> None:
    for block in code_blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("rlhf_"):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def test_readme_has_the_commands_that_ci_runs() -> None:
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (first, *_) = code_blocks(ROOT / "README.md", "")
    assert first.splitlines() == ["pip install uv && uv run rlhf-train minmax", "uv run pytest"]
    assert "pip install --quiet uv" in ci
    for command in ("uv run rlhf-train minmax", "uv run pytest"):
        assert re.search(rf'^step "[^"]*" {command} ', ci, re.M), f"CI does not run {command}"


def test_every_page_of_docs_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [p.name for p in sorted((ROOT / "docs").glob("*.md")) if f"docs/{p.name}" not in readme] == []


@pytest.mark.parametrize("page", ["docs/packing.md", "benchmarks/README.md"])
def test_ratios_are_those_of_the_benchmark(page: str) -> None:
    result = json.loads((ROOT / "benchmarks/results/packed_scoring.json").read_text(encoding="utf-8"))
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, workload in result["workloads"].items():
        ratios = [workload[key]["ratio"] for key in ("tokens", "seconds", "peak_memory_mb")]
        row = " | ".join(f"{ratio:.1f}" for ratio in ratios)
        assert re.search(rf"^\| `{name}`[^|]*\| {re.escape(row)} \|", text, re.M), (
            f"{page}: {name} should read {row}"
        )
