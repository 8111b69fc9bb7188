"""What `scripts/build_release.sh` leaves is whole, agrees with the lock, and is the same when built again."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEMBERS = sorted(path.parent.name for path in ROOT.glob("*/*/pyproject.toml"))

pytestmark = pytest.mark.slow


def _build(folder: Path) -> dict[str, bytes]:
    subprocess.run([ROOT / "scripts" / "build_release.sh", folder], check=True)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_release_is_whole_and_the_same_again(tmp_path: Path):
    files = _build(tmp_path / "one")
    packages = {name: content for name, content in files.items() if name.endswith((".whl", ".tar.gz"))}
    for ending in (".whl", ".tar.gz"):
        built = {name.split("-")[0].replace("_", "-") for name in packages if name.endswith(ending)}
        assert sorted(built) == MEMBERS
    assert files.keys() - packages.keys() == {"SHA256SUMS", "sbom.cdx.json"}

    listed = [line.split(maxsplit=1) for line in files["SHA256SUMS"].decode().splitlines()]
    sums = {
        name: hashlib.sha256(content).hexdigest() for name, content in files.items() if name != "SHA256SUMS"
    }
    assert {name.lstrip("*"): digest for digest, name in listed} == sums

    bill = json.loads(files["sbom.cdx.json"])
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    found = {(each["name"], each["version"]) for each in bill["components"] if "version" in each}
    lock = (ROOT / "requirements.lock").read_text()
    locked = set(re.findall(r"^([\w.-]+)==([^ \\]+)", lock, re.M))
    ours = {name for name, _ in found} & {*MEMBERS, "rlhf"}
    assert {pair for pair in found if pair[0] not in ours} <= locked
    assert {"torch", "vllm", "ray"} <= {name for name, _ in found}

    again = _build(tmp_path / "two")
    assert {name: again[name] for name in packages} == packages


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path):
    (tmp_path / "old").touch()
    run = subprocess.run([ROOT / "scripts" / "build_release.sh", tmp_path], capture_output=True)
    assert run.returncode == 2
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
