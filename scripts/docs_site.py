"""The hook of mkdocs.yml: the site has the folders of the repository, so links between files work in both.

Its pages are the Markdown files, the tutorials with their outputs, the files that any of these link to, and
the API reference. A public name without a docstring stops the build.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from api_pages import api_navigation, api_pages, missing_docstrings
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(\]\()([^)\s#]+)")
_COPIED = (".css", ".js", ".png", ".svg")


class Listing(File):
    """A page that is made of a file which is not Markdown."""

    def is_documentation_page(self) -> bool:
        """True: it is rendered, not copied."""
        return True


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fails on a public name without a docstring; puts the API reference in its place in the navigation."""
    if missing := missing_docstrings():
        raise PluginError(f"these have no docstring: {', '.join(missing)}")
    assert config.nav is not None
    config.nav = [
        {"API reference": api_navigation()} if "API reference" in entry else entry for entry in config.nav
    ]
    return config


@event_priority(100)
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """All pages and what they link to, by their paths in the repository, in place of docs/ alone."""
    made = [file for file in files if file.src_dir != config.docs_dir]
    sources = {
        path.relative_to(ROOT).as_posix() for pattern in config.extra["pages"] for path in ROOT.glob(pattern)
    }
    contents = {source: _markdown(source) for source in sorted(sources)}
    linked = {target for source, text in contents.items() for target in _targets(source, text)} - sources
    linked |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "assets").iterdir()}
    for folder in {target for target in linked if (ROOT / target).is_dir()}:
        linked |= {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).iterdir() if path.is_file()}
    for source, text in contents.items():
        kind = File if source.endswith(".md") else Listing
        made.append(kind.generated(config, source, content=text))
    for source in sorted(linked):
        made.append(_file(source, config))
    made += [File.generated(config, source, content=text) for source, text in api_pages().items()]
    return Files(made)


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links to a folder lead to its listing."""

    def replace(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), match[2]))
        is_folder = ":" not in match[2] and (ROOT / target).is_dir()
        return f"{match[1]}{match[2].rstrip('/')}/README.md" if is_folder else match[0]

    return _LINK.sub(replace, markdown)


def _markdown(source: str) -> str:
    text = (ROOT / source).read_text(encoding="utf-8")
    return text if source.endswith(".md") else "\n\n".join(_cells(json.loads(text)))


def _cells(notebook: dict[str, Any]) -> Iterator[str]:
    """The cells of a notebook with their outputs, as Markdown."""
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield text
            continue
        yield _code(text)
        for output in cell["outputs"]:
            data = output.get("data", {})
            printed = "".join(output.get("text", ())) or "".join(data.get("text/plain", ()))
            if "image/png" in data:
                encoded = "".join(data["image/png"]).replace("\n", "")
                yield f'<img alt="Output of the cell above" src="data:image/png;base64,{encoded}">'
            elif printed:
                yield f"````{{ .text .output }}\n{printed.rstrip()}\n````"


def _code(cell: str) -> str:
    """A code cell: commands of a shell, or a file with its name, where its first line says so."""
    first, _, rest = cell.partition("\n")
    if first == "%%bash":
        return f"````bash\n{rest}\n````"
    if first.startswith("%%writefile "):
        name = first.removeprefix("%%writefile ")
        return f'````{{ .{posixpath.splitext(name)[1][1:]} title="{name}" }}\n{rest}\n````'
    return f"````python\n{cell}\n````"


def _targets(source: str, text: str) -> Iterator[str]:
    """The files and folders of the repository that a page links to."""
    for _, link in _LINK.findall(text):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        if ":" not in link and (ROOT / target).exists():
            yield target


def _file(source: str, config: MkDocsConfig) -> File:
    """What a browser shows or runs, as it is; a folder or any other file as a page that search leaves out."""
    path, name = ROOT / source, posixpath.basename(source)
    if source.endswith(_COPIED):
        return File.generated(config, source, abs_src_path=str(path))
    head = f"---\nsearch:\n  exclude: true\n---\n# {source}\n\n"
    if path.is_dir():
        files = sorted(each.name for each in path.iterdir() if each.is_file())
        text = head + "\n".join(f"- [{each}]({each})" for each in files)
        return File.generated(
            config, f"{source}/README.md", content=text, inclusion=InclusionLevel.NOT_IN_NAV
        )
    language = {"jsonl": "json", "dockerfile": "docker"}.get(name.rpartition(".")[2], name.rpartition(".")[2])
    text = f"{head}````{language}\n{path.read_text(encoding='utf-8').rstrip()}\n````\n"
    listing = Listing.generated(config, source, content=text, inclusion=InclusionLevel.NOT_IN_NAV)
    listing.dest_uri = f"{source}.html"
    return listing
