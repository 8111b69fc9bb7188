"""What SECURITY.md says of the sources: nothing is unpickled, no model brings code, nothing is reported."""

from __future__ import annotations

import ast
import importlib
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).parents[2]
MEMBERS = sorted([*ROOT.glob("packages/*"), *ROOT.glob("apps/*")])
UNPICKLERS = {"cloudpickle", "dill", "joblib", "marshal", "shelve"}
TELEMETRY = {
    "packages/rlhf-algos/src/rlhf_algos/distributed/cluster.py": "RAY_USAGE_STATS_ENABLED",
    "packages/rlhf-infer/src/rlhf_infer/vllm/process.py": "VLLM_NO_USAGE_STATS",
    "packages/rlhf-infer/src/rlhf_infer/vllm/settings.py": "VLLM_NO_USAGE_STATS",
}
"""Where libraries are told to report nothing; the commands tell the hub's library."""


def _dotted(node: ast.expr) -> str:
    return (
        f"{_dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    )


def _problems(call: ast.Call) -> list[str]:
    """What is dangerous about a call."""
    name = _dotted(call.func)
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    values = {key: value.value for key, value in given.items() if isinstance(value, ast.Constant)}
    wrong = [f"{key}=True" for key in ("allow_pickle", "trust_remote_code") if values.get(key) is True]
    if name in ("pickle.load", "pickle.loads", "pickle.Unpickler", "eval", "exec", "os.system"):
        wrong.append(name)
    if name in ("torch.load", "load_peft_weights") and values.get("weights_only") is not True:
        wrong.append(f"{name} without weights_only=True")
    if name == "yaml.load" and not {_dotted(arg) for arg in (*call.args, *given.values())} & {
        "ConfigLoader",
        "_Loader",
    }:
        wrong.append("yaml.load with another loader than ours, which are safe")
    return wrong


def _found(source: str) -> list[str]:
    """What is dangerous in a module."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            found += [f"line {node.lineno}: {problem}" for problem in _problems(node)]
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [f"import of {name}" for name in names if name.split(".")[0] in UNPICKLERS]
    return found


@pytest.mark.parametrize("member", MEMBERS, ids=lambda path: path.name)
def test_modules_run_nothing_that_they_read(member: Path):
    sources = sorted(member.glob("src/**/*.py"))
    found = {str(path.relative_to(ROOT)): _found(path.read_text(encoding="utf-8")) for path in sources}
    assert found and {path: problems for path, problems in found.items() if problems} == {}


@pytest.mark.parametrize(
    "line",
    [
        "pickle.loads(b'')",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "yaml.load(text, yaml.Loader)",
        "AutoConfig.from_pretrained(name, trust_remote_code=True)",
        "np.load(path, allow_pickle=True)",
        "import joblib",
        "eval(text)",
    ],
)
def test_what_would_run_it_is_found(line: str):
    assert len(_found(line)) == 1


def test_yaml_loaders_are_safe():
    import yaml

    from rlhf_data import config_text
    from rlhf_merge.config import reading

    for loader in (config_text.ConfigLoader, reading._Loader):
        assert issubclass(loader, yaml.SafeLoader)


@pytest.mark.parametrize("command", ["rlhf_train.cli", "rlhf_report.cli", "rlhf_serve.cli.main"])
def test_commands_send_the_hub_no_telemetry(command: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "")
    monkeypatch.delenv("HF_HUB_DISABLE_TELEMETRY")
    main = importlib.import_module(command).main
    subcommand = {"rlhf_train.cli": "sft", "rlhf_report.cli": "compare"}.get(command, "generate")
    assert CliRunner().invoke(main, [subcommand, "--help"]).exit_code == 0
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"


def test_libraries_are_told_to_report_nothing():
    for path, variable in TELEMETRY.items():
        assert variable in (ROOT / path).read_text(encoding="utf-8")
