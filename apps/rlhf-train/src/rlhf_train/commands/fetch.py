"""`rlhf-train fetch`: files that come with the package, as a folder to change."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click

from rlhf_data import UserError, atomic_folder

_CONFIGS = Path(__file__).parents[1] / "configs"
_LINK_ELSEWHERE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")


def fetch_configs(folder: str) -> None:
    """Write every config into a new folder, and say where.

    Raises:
        UserError: the folder exists, for its files may have been changed; or the package has no configs.
    """
    target = Path(folder)
    if os.path.lexists(target):
        raise UserError(
            f"{folder} exists, and nothing in it is overwritten; name a new folder", code="folder_exists"
        )
    sources = sorted(path for path in _CONFIGS.rglob("*") if path.is_file())
    if not sources:
        raise UserError(
            "this installation has no configs, for it was made from a copy of the repository without its "
            "links; take the folder configs of the repository",
            code="no_configs",
        )
    with atomic_folder(target) as temporary:
        for source in sources:
            path = temporary / source.relative_to(_CONFIGS)
            path.parent.mkdir(parents=True, exist_ok=True)
            text = source.read_text(encoding="utf-8")
            path.write_text(
                _LINK_ELSEWHERE.sub(r"\1", text) if path.suffix == ".md" else text, encoding="utf-8"
            )
    click.echo(f"{len(sources)} files in {folder}; {target / 'README.md'} says what each is for")
