"""`rlhf-serve generate --search`: tree search in place of best-of-N, and the file of its trees."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_data import Text, UserError
from rlhf_infer import SearchSettings, SearchTree, Selected, TreeSearch, extractor, read_trees, write_trees
from rlhf_infer.search.checks import check_search_settings
from rlhf_serve.cli.files import open_engine, sampling_params
from rlhf_serve.cli.load import Parts
from rlhf_serve.cli.output import check_writable
from rlhf_serve.settings import BatchSettings


def is_by_tree(settings: BatchSettings) -> bool:
    """Whether a tree is searched: always with `--search`, but for best-of-n without a budget in tokens."""
    search = settings.search
    if search is None:
        return False
    return search.strategy != "best-of-n" or "budget_tokens" in search.model_fields_set


def check_search(settings: BatchSettings) -> None:
    """Refuse options that make no sense with or without a search, before anything is loaded."""
    search = settings.search
    if search is not None and "strategy" not in search.model_fields_set:
        raise UserError(
            "settings of a search are given without its strategy; give --search too", code="unused_option"
        )
    if settings.search_tree is not None and not is_by_tree(settings):
        raise UserError(
            "--search-tree writes the tree of a search in steps or with a budget; give --search, and for "
            "best-of-n --search-budget-tokens",
            code="unused_option",
        )
    if settings.search_tree is not None:
        others = (settings.input_path, settings.output_path)
        if Path(settings.search_tree).resolve() in [Path(other).resolve() for other in others]:
            raise UserError(
                f"--search-tree {settings.search_tree} is the input or the output; name another file",
                code="conflicting_options",
            )
    if search is None:
        return
    if settings.stop_early or settings.budget is not None:
        raise UserError(
            "stop_early and budget count whole samples, which a search does not draw; give "
            "--search-budget-tokens instead",
            code="conflicting_options",
        )
    if is_by_tree(settings):
        _check_tree(settings, search)
    elif "width" in search.model_fields_set:
        raise UserError(
            "best-of-n without a budget in tokens draws --n candidates; give --n instead of --search-width",
            code="conflicting_options",
        )


def _check_tree(settings: BatchSettings, search: SearchSettings) -> None:
    if "n" in settings.model_fields_set:
        raise UserError(
            "n counts the candidates of best-of-N; a search takes --search-width and --search-budget-tokens",
            code="conflicting_options",
        )
    if settings.model is not None and not settings.reward:
        raise UserError(
            f"the search {search.strategy} chooses by scores and has none; give --reward-model, best a "
            "process reward model",
            code="missing_scorer",
        )
    if "selection" in search.model_fields_set:
        raise UserError(
            "search.selection and selection are one setting here; give --selection",
            code="conflicting_options",
        )


class TreeFile:
    """The file of trees, a row per row of the output; trees after the first `done` rows are dropped."""

    def __init__(self, path: str, done: int) -> None:
        self.path, self.begun = Path(path), False
        self.trees = read_trees(path, done) if done else []
        if len(self.trees) < done:
            raise UserError(
                f"{path} has {len(self.trees)} trees, the output {done} rows; choose another output, or "
                "--overwrite",
                code="different_config",
            )
        try:
            check_writable(self.path)
        except OSError as error:
            raise UserError(
                f"the search tree {path} cannot be written ({error.strerror or error}); name another file",
                code="unwritable",
            ) from error

    def append(self, trees: Sequence[SearchTree]) -> None:
        """Add the trees of the next rows."""
        if not self.begun:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_trees(str(self.path), self.trees)
            self.begun = True
        with open(self.path, "a", encoding="utf-8") as file:
            file.writelines(line + "\n" for tree in trees for line in tree.lines())
            file.flush()
            os.fsync(file.fileno())


class TreeSampler:
    """A `TreeSearch` with the interface of `BestOfNSampler`, which keeps its trees in a file, if given."""

    def __init__(self, search: TreeSearch, file: TreeFile | None) -> None:
        self.search, self.file = search, file

    def sample(
        self, prompts: Sequence[Text], columns: Mapping[str, Sequence[Any]] | None = None
    ) -> list[Selected]:
        """The candidates of every prompt, and their order."""
        results = self.search.run(prompts, columns)
        if self.file is not None:
            self.file.append([result.tree for result in results])
        return [result.selected for result in results]


def tree_sampler(
    settings: BatchSettings, parts: Parts, rows: Sequence[dict[str, Any]], done: int
) -> tuple[TreeSampler, Callable[[], None]]:
    """The sampler, and the function that closes its engine; `done` rows of the output are there."""
    assert settings.search is not None
    chosen = settings.search.model_copy(update={"selection": settings.selection})
    file = None if settings.search_tree is None else TreeFile(settings.search_tree, done)
    extract = extractor(settings.answer) if settings.selection != "best" else None
    params = sampling_params(settings)
    check_search_settings(chosen, params, extract)
    engine, close = open_engine(settings, parts, rows, done)
    try:
        search = TreeSearch(engine, parts.rewards, engine.tokenizer, chosen, params, extract=extract)
    except UserError:
        close()
        raise
    return TreeSampler(search, file), close
