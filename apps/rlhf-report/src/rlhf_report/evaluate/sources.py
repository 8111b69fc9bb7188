"""Sources of an evaluation: models to sample from, and files of completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_data import PromptRecord, UserError, model_folder
from rlhf_eval.answers import encodable, read_answers
from rlhf_eval.evaluation import Written
from rlhf_eval.scoring import as_text
from rlhf_report.compare.table import key_of
from rlhf_report.options import check_policy, split_name


@dataclass(frozen=True)
class Source:
    """A model or a file of completions."""

    name: str
    path: str
    is_file: bool


def parse_source(given: str) -> Source:
    """A source from `[NAME=]PATH`."""
    name, path = split_name(given)
    if Path(path).is_file():
        return Source(name or Path(path).name.split(".")[0], path, is_file=True)
    return Source(name or Path(path).name or path, model_folder(path), is_file=False)


def check_sources(sources: Sequence[Source]) -> None:
    """Refuse sources that cannot be evaluated, before anything is loaded."""
    for source in sources:
        if [each.name for each in sources].count(source.name) > 1:
            raise UserError(
                f"two models are called {source.name}; tell them apart with NAME=PATH", code="repeated_name"
            )
        if not source.is_file:
            check_policy(source.path)


def fitting(
    sources: Sequence[Source],
    prompts: Sequence[PromptRecord],
    max_new_tokens: int,
    *,
    one_tokenizer: bool,
    skip: bool,
) -> list[PromptRecord]:
    """The prompts that every model can read and complete; weights are not loaded.

    The first source is the reference; with `one_tokenizer` all models need its tokenizer, for the KL. `skip`
    leaves out prompts that do not fit, in place of refusing them.
    """
    from rlhf_eval.evaluation import prompt_ids
    from rlhf_eval.evaluation.divergence import check_same_tokens
    from rlhf_models import adapter_base, is_adapter, load_adapter_tokenizer, load_config, load_tokenizer

    first, kept = None, list(prompts)
    for source in (each for each in sources if not each.is_file):
        base = adapter_base(source.path) if is_adapter(source.path) else None
        tokenizer = load_adapter_tokenizer(source.path, base) if base else load_tokenizer(source.path)
        shape = load_config(base or source.path)
        first = first or (source.name, tokenizer)
        if one_tokenizer:
            check_same_tokens(tokenizer, first[1], (source.name, first[0]))
        fits = []
        for record in kept:
            try:
                prompt_ids(tokenizer, shape, record, max_new_tokens)
            except UserError as error:
                if not skip:
                    text = f"{error}; or leave such prompts out with --on-bad-row skip"
                    raise UserError(text, code=error.code, **error.fields) from error
                continue
            fits.append(record)
        kept = fits
    return kept


def completions_of(source: Source, prompts: Sequence[PromptRecord], count: int) -> list[list[Written]]:
    """`count` completions of each prompt from a file, matched by the text of the prompt."""
    found: dict[bytes, list[Written]] = {}
    for answer in read_answers(source.path):
        if answer.output is None:
            raise UserError(
                f"{answer.place}: no completion; expected what the model wrote", code="missing_value"
            )
        found.setdefault(key_of(answer.prompt), []).append(Written(encodable(answer.output)))
    groups = []
    for record in prompts:
        group = found.get(key_of(as_text(record.prompt)), [])
        if len(group) < count:
            raise UserError(
                f"{source.path} has {len(group)} completions of {record.where or 'a prompt'}, {count} are "
                "needed; evaluate on the prompts that it answers, or take another --samples"
            )
        groups.append(group[:count])
    return groups
