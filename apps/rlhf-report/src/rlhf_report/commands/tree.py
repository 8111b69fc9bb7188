"""`rlhf-report tree`: pictures of search trees."""

from __future__ import annotations

from pathlib import Path

import click

from rlhf_report.options import explained, tokenizer_of


@click.command("tree")
@click.argument("trees", type=click.Path(path_type=Path))
@click.option(
    "--tokenizer", required=True, metavar="MODEL", help="Folder or hub name of the model that was searched."
)
@click.option(
    "--prompts",
    default=10,
    type=click.IntRange(1),
    show_default=True,
    help="Number of trees shown, from the first.",
)
@click.option(
    "--nodes",
    default=150,
    type=click.IntRange(1),
    show_default=True,
    help="Most steps drawn per tree: the most visited.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Page to write.  [default: TREES with the ending .html]",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing page.")
@explained
def command(
    trees: Path, tokenizer: str, prompts: int, nodes: int, output: Path | None, overwrite: bool
) -> None:
    """Draw the steps that a tree search tried, with their values.

    TREES is what `rlhf-serve generate --search-tree` or `rlhf_infer.write_trees` has written.
    """
    from rlhf_data import UserError, atomic_write_text, ensure_writable_folder

    path = output or trees.with_suffix(".html")
    if path.resolve() == trees.resolve():
        raise UserError(f"{path} is the file of the trees; name another --output", code="conflicting_options")
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists; choose another --output, or give --overwrite", code="file_exists")
    from rlhf_infer import read_trees
    from rlhf_report.tree.page import trees_page

    found = read_trees(trees, prompts)
    if not found:
        raise UserError(f"{trees} holds no search tree", code="no_rows")
    words = tokenizer_of(tokenizer)
    ensure_writable_folder(path.parent)
    written = trees_page(
        found,
        lambda ids: str(words.decode(list(ids))),
        most_nodes=nodes,
        source=trees.name,
    )
    atomic_write_text(path, written)
    click.echo(f"wrote {path}")
