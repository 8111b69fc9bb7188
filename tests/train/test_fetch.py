"""`rlhf-train fetch configs`: the configs of the repository, wherever the package is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from click.testing import Result

from files import done
from rlhf_data import load_config_file
from rlhf_train.commands import fetch

CONFIGS = Path(__file__).parents[2] / "configs"


def _files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def test_the_package_has_every_config() -> None:
    packaged = Path(fetch.__file__).parents[1] / "configs"
    assert _files(packaged) == _files(CONFIGS)
    assert all((packaged / name).read_bytes() == (CONFIGS / name).read_bytes() for name in _files(CONFIGS))


def test_a_folder_of_configs_that_can_be_used(train: Callable[..., Result]) -> None:
    done(train("fetch", "configs"))
    assert _files(Path("configs")) == _files(CONFIGS)
    assert load_config_file("configs/dpo.yaml") == load_config_file(CONFIGS / "dpo.yaml")
    readme = Path("configs/README.md").read_text(encoding="utf-8")
    assert "](../" not in readme and "](presets)" in readme
    done(train("sft", "--config", "configs/sft.yaml", "--dry-run"))


def test_nothing_is_overwritten(train: Callable[..., Result]) -> None:
    mine = Path("configs", "mine.yaml")
    mine.parent.mkdir()
    mine.write_text("seed: 1\n")
    result = train("fetch", "configs")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and "exists" in result.stderr
    assert _files(Path("configs")) == {Path("mine.yaml")}
    done(train("fetch", "configs", "new/place"))
    assert _files(Path("new/place")) == _files(CONFIGS)
