"""Whole `rlhf-merge` processes on models of 60 MB: bounded in memory, and on a disk that is full."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytestmark = pytest.mark.slow
COMMAND = str(Path(sys.executable).with_name("rlhf-merge"))
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The options for a base and two fine-tunes of 30 million parameters in bfloat16."""
    root = tmp_path_factory.mktemp("models")
    generator = torch.Generator().manual_seed(0)
    base = {f"model.layers.{i}.w": torch.randn(1250, 2000, generator=generator) for i in range(12)}
    for name in ("base", "a", "b"):
        (root / name).mkdir()
        (root / name / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 12}')
        (root / name / "tokenizer.json").write_text('{"model": {"vocab": {}}}' + " " * 400_000)
        tensors = {
            key: (tensor + (name != "base") * 0.1 * torch.randn(1250, 2000, generator=generator)).bfloat16()
            for key, tensor in base.items()
        }
        save_file(tensors, root / name / "model.safetensors")
    yield ["--base", str(root / "base"), "--model", str(root / "a"), "--model", str(root / "b")]
    shutil.rmtree(root)


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path: Path) -> Iterator[None]:
    """Results of 60 MB are not kept, as pytest keeps files of the last runs."""
    yield
    shutil.rmtree(tmp_path)


def finished(*arguments: Any, code: int = 0) -> str:
    """Run the command to its end; what it said."""
    words = [COMMAND, *map(str, arguments)]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stderr


def digest(folder: Path) -> dict[str, int]:
    """The contents of a folder's files, briefly."""
    return {path.name: hash(path.read_bytes()) for path in folder.iterdir()}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
@pytest.mark.parametrize(
    ("method", "options"),
    [
        pytest.param("ties", ["--density", "0.5"], marks=pytest.mark.proof),
        pytest.param("breadcrumbs-ties", ["--density", "0.5", "--dtype", "float64"], marks=pytest.mark.proof),
        pytest.param("della", ["--density", "0.5"], marks=pytest.mark.proof),
        ("dare-ties", ["--density", "0.5"]),
        ("model-stock", []),
    ],
)
def test_a_bound_on_memory_is_kept(models: list[str], tmp_path: Path, method: str, options: list[str]):
    """The least bound that the refusal names is enough, and the process stays below it."""
    command = [method, *models, *options, tmp_path / "out", "--quiet"]
    said = finished(*command, "--max-memory", "1MB", code=2)
    found = re.search(r"allow at least (\d+) MB", said)
    assert found and not (tmp_path / "out").exists()
    bound = int(found[1]) + 5  # what Python takes differs a little from run to run
    words = [sys.executable, "-c", _MEASURED, *map(str, command), "--max-memory", f"{bound}MB"]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 <= bound * 10**6, f"{int(done.stdout) / 1e3:.0f} kB of {bound} MB"


_MEASURED = """
import re
from rlhf_merge.cli.main import main
try:
    main(prog_name="rlhf-merge")
finally:
    print(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
"""
"""The command, which prints the most memory it ever had, in KiB."""


_FULL = """
mount -t tmpfs -o size=$2 tmpfs "$1" || exit 99
shift 2
"$PYTHON" -c "$CODE" "$@" --threads 2
echo "exit code $?"
ls -A "$DISK"
mount -o remount,size=200m "$DISK"
"$PYTHON" -c "$CODE" "$@" && cp -r "$OUT" "$COPY"
"""

_HOPEFUL = """
import shutil, types
if {hopeful}: shutil.disk_usage = lambda path: types.SimpleNamespace(free=10**12)
import rlhf_merge.files.writer
rlhf_merge.files.writer._FLUSH_SECONDS = 0.1
from rlhf_merge.cli.main import main
main(prog_name="rlhf-merge")
"""
"""The command; with a disk that seems to be empty, as one that others fill meanwhile was."""


@pytest.mark.parametrize(
    ("size", "hopeful", "left"),
    [
        pytest.param("30m", False, "", marks=pytest.mark.proof),
        ("30m", True, ".out.merging"),  # is full amid the tensors
        pytest.param(
            "58700k", True, ".out.merging", marks=pytest.mark.proof
        ),  # is full when the tokenizer is copied
    ],
)
def test_a_full_disk(models: list[str], tmp_path: Path, size: str, hopeful: bool, left: str):
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("needs to mount a small file system of its own (unshare -rm)")
    options = ["--density", "0.5"]
    finished("dare-ties", *models, *options, tmp_path / "whole")
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", _FULL, "sh", disk, size, "dare-ties", *models, *options, disk / "out"],
        env=ENVIRONMENT
        | {"PYTHON": sys.executable, "CODE": _HOPEFUL.format(hopeful=hopeful)}
        | {"DISK": str(disk), "OUT": str(disk / "out"), "COPY": str(copy)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["exit", "code", "2", *([left] if left else [])]
    assert "Traceback" not in done.stderr
    if hopeful:
        assert f"Error: no space is left for {disk / 'out'}; free some and give the same" in done.stderr
    else:
        assert f"Error: {disk / 'out'} needs 60.0 MB and its disk has" in done.stderr
    assert digest(copy) == digest(tmp_path / "whole")
