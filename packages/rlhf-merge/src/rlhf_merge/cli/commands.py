"""The commands: call the library, show progress, print results."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from rlhf_merge.config.merge_config import MergeConfig
from rlhf_merge.config.reading import parse_yaml
from rlhf_merge.errors import MergeError
from rlhf_merge.files.writer import check_output
from rlhf_merge.methods.blocks import Begin, OnBytes
from rlhf_merge.methods.families import METHODS
from rlhf_merge.run.card import effective_weights
from rlhf_merge.run.merger import ModelMerger, Resources, expected_bytes
from rlhf_merge.run.plan import MergePlan
from rlhf_merge.text import bytes_text, short_names

_SHOWN_EVERY = 8_000_000
_WIDEST = 10_000


def merge_config_file(config: str, out: str, **options: Any) -> None:
    """`rlhf-merge run`."""
    _merge(MergeConfig.from_file(config), out, options)


def merge_by_options(
    method: str, out: str, base: str | None, models: Sequence[str], options: dict[str, Any]
) -> None:
    """The command of a method."""
    taken = METHODS[method].parameters
    values: dict[str, Any] = {"method": method} | _given(options, "dtype", "vocab", "ignore", "seed")
    values |= {"base": base} if base is not None else {}
    values["models"] = [_model(spec) if "weight" in taken else spec for spec in models]
    for key in taken:
        given = options.pop(f"set_{key}", ())
        if given:
            values[key] = _setting(key, given)
    _merge(MergeConfig.from_dict(values, method.replace("_", "-")), out, options)


def show_plan(config: str, *, as_json: bool, **options: Any) -> None:
    """`rlhf-merge plan`."""
    merger = ModelMerger(MergeConfig.from_file(config), resources=_resources(options))
    with closing(merger.plan()) as plan:
        if as_json:
            print(json.dumps(_plan_json(merger, plan), indent=2))
        else:
            _print_plan(Console(), merger, plan)


def cook_soup(
    out: str,
    *,
    models: Sequence[str],
    evaluate: str | None,
    lower_is_better: bool,
    restart: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """`rlhf-merge soup`."""
    from rlhf_merge.run.soup import ModelSoup, Trial

    settings = _given(options, "base", "dtype", "vocab", "ignore")
    soup = ModelSoup(models, settings, _resources(options))
    console = Console(stderr=True, quiet=quiet, highlight=False)
    if evaluate is None and lower_is_better:
        message = "--lower-is-better is about the number of --evaluate, which is missing; add it"
        raise MergeError(message, code="unused_option", option="--lower-is-better")

    def on_trial(trial: Trial) -> None:
        verdict = ("  not worse, kept" if trial.accepted else "  worse, left out") * (len(trial.members) > 1)
        _say(console, f"{trial.score:.6g}  {' + '.join(trial.members)}{verdict}")

    with _progress(console, "soup") as begin:
        if evaluate is None:
            merger = ModelMerger(soup.config, resources=soup.resources)
            plan = merger.plan()
            on_bytes = begin(plan.bytes_read + plan.bytes_written)
            result = merger.merge(out, restart=restart, on_bytes=on_bytes, plan=plan)
            said = f"uniform soup of {len(models)} models: {result.folder}"
        else:
            higher = not lower_is_better
            cooked = soup.greedy(
                out, evaluate, higher_is_better=higher, restart=restart, on_trial=on_trial, on_merge=begin
            )
            share = f"{len(cooked.members)} of {len(models)} models"
            said = f"greedy soup of {share}, {cooked.score:.6g}: {cooked.folder}"
    _say(console, said)


def show_model(model: str, *, by: Literal["layer", "tensor"], as_json: bool, threads: int | None) -> None:
    """`rlhf-merge inspect`."""
    from rlhf_merge.compare.inspect import inspect_model, render_summary, summary_json

    with _progress(Console(stderr=True), "reading") as begin:
        summary = inspect_model(model, threads=threads, begin=begin)
    if as_json:
        print(json.dumps(summary_json(summary), indent=2))
    else:
        _print_whole(render_summary(summary, by=by))


def show_difference(
    models: Sequence[str],
    *,
    base: str | None,
    by: Literal["layer", "kind", "tensor"],
    density: float | None,
    png: str | None,
    as_json: bool,
    threads: int | None,
) -> None:
    """`rlhf-merge diff`."""
    from rlhf_merge.compare.diff import diff_models
    from rlhf_merge.compare.report import check_heatmap, difference_json, heatmap, render_difference

    first, others = (base, models) if base is not None else (models[0], models[1:])
    if not others:
        message = "diff compares models and got one; name a second one, or give --base"
        raise MergeError(message, code="too_few_models")
    if png is not None:
        check_heatmap(Path(png))
    with _progress(Console(stderr=True), "reading") as begin:
        difference = diff_models(first, list(others), density=density, threads=threads, begin=begin)
    if png is not None:
        heatmap(difference, Path(png))
    if as_json:
        print(json.dumps(difference_json(difference), indent=2))
    else:
        _print_whole(render_difference(difference, by=by))


def _print_whole(tables: RenderableType) -> None:
    """Print tables as wide as their numbers are: a narrow terminal wraps lines, and no digit is lost."""
    console = Console()
    unbounded = console.options.update(max_width=_WIDEST)
    console.width = max(console.width, Measurement.get(console, unbounded, tables).minimum)
    console.print(tables)


def _merge(config: MergeConfig, out: str, options: dict[str, Any]) -> None:
    merger = ModelMerger(config, resources=_resources(options), max_shard_size=options["max_shard_size"])
    console = Console(stderr=True, quiet=options["quiet"], highlight=False)
    check_output(Path(out))
    with closing(merger.plan()) as plan:
        plan.check_outside(Path(out))
        if options["dry_run"]:
            _print_plan(Console(quiet=options["quiet"]), merger, plan)
            return
        merger.resources.threads_for(plan)  # refused before anything is shown
        with _progress(console, METHODS[config.method].title) as begin:
            on_bytes = begin(plan.bytes_read + plan.bytes_written)
            result = merger.merge(out, restart=options["restart"], on_bytes=on_bytes, plan=plan)
    if plan.ignored:
        _say(console, f"left out: {', '.join(plan.ignored)}")
    if result.resumed:
        console.print(f"resumed: {result.resumed} of {result.tensors} tensors had been merged before")
    rows = effective_weights(plan, result.coefficients)
    shown = [
        f"{name} {mean:.4g}" + (f" ({low:.4g} to {high:.4g})" if high - low > 1e-9 else "")
        for name, (_, low, mean, high) in zip(short_names([row[0] for row in rows]), rows, strict=True)
    ]
    if shown:
        _say(console, f"effective weights: {', '.join(shown)}")
    _say(console, f"{result.tensors} tensors, {bytes_text(result.bytes_written)}: {result.folder}")


@contextmanager
def _progress(console: Console, what: str) -> Iterator[Begin]:
    """A bar with bytes, bytes/s and the time left, which begins again with every work."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    lock, waiting = threading.Lock(), 0
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=console.quiet) as progress:
        task = progress.add_task(what, total=None)

        def begin(total: int) -> OnBytes:
            nonlocal waiting
            waiting = 0
            progress.reset(task, total=total)
            return on_bytes

        def on_bytes(count: int) -> None:
            nonlocal waiting
            with lock:
                waiting += count
                if waiting < _SHOWN_EVERY:
                    return
                moved, waiting = waiting, 0
            progress.advance(task, moved)

        yield begin
        progress.advance(task, waiting)


def _print_plan(console: Console, merger: ModelMerger, plan: MergePlan) -> None:
    title, facts = METHODS[plan.config.method].title, _plan_json(merger, plan)
    table = Table("model", "tensors", "size", "type", title=title, title_justify="left")
    for spec, checkpoint in plan.checkpoints.items():
        tensors = checkpoint.tensors.values()
        types = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
        size = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)
        table.add_row(spec, str(len(tensors)), bytes_text(size), ", ".join(types))
    console.print(table)
    lines = [
        plan.config.to_yaml().rstrip(),
        f"reads {bytes_text(plan.bytes_read)} (every pass counted), writes {bytes_text(plan.bytes_written)} "
        f"in {len(plan.shards)} file{'s' if len(plan.shards) > 1 else ''}, {plan.parameters:,} parameters",
        f"memory: {bytes_text(facts['memory'])} with {facts['threads']} threads",
        f"config of {plan.config_from}, tokenizer of {plan.tokenizer}",
    ]
    if plan.alignment and any(index is not None for index in plan.alignment.indexes):
        lines.append(f"vocabulary: {plan.alignment.rows} rows, {len(plan.alignment.added)} tokens added")
    if plan.ignored:
        lines.append(f"leaves out {', '.join(plan.ignored)}")
    _say(console, "\n".join(lines))


def _plan_json(merger: ModelMerger, plan: MergePlan) -> dict[str, Any]:
    threads = merger.resources.threads_for(plan)
    return {
        "config": plan.config.to_dict(),
        "models": {spec: len(checkpoint.tensors) for spec, checkpoint in plan.checkpoints.items()},
        "bytes_read": plan.bytes_read,
        "bytes_written": plan.bytes_written,
        "parameters": plan.parameters,
        "files": {shard.file: shard.size for shard in plan.shards},
        "threads": threads,
        "memory": expected_bytes(plan, threads),
        "tokenizer": plan.tokenizer,
    }


def _say(console: Console, text: str) -> None:
    """Print text as it is, each line as long as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _resources(options: dict[str, Any]) -> Resources:
    return Resources(options["threads"], options["max_memory"])


def _given(options: dict[str, Any], *keys: str) -> dict[str, Any]:
    """These options, taken out of the others, where they were given."""
    return {key: value for key in keys if (value := options.pop(key)) not in (None, ())}


def _model(text: str) -> dict[str, Any] | str:
    """MODEL:WEIGHT; what follows the last colon is a weight only if it is a number."""
    spec, colon, weight = text.rpartition(":")
    try:
        return {"model": spec, "weight": float(weight)} if colon and spec else text
    except ValueError:
        return text


def _setting(key: str, given: Sequence[str]) -> Any:
    """VALUE, VALUE,VALUE or WORD=VALUE, as a config has them."""
    rules = []
    for text in given:
        word, equals, value = text.rpartition("=")
        parsed = [_value(part) for part in value.split(",")]
        rules.append({"filter": word or "*", "value": parsed if len(parsed) > 1 else parsed[0]})
        if equals and not word:
            message = f"--{key.replace('_', '-')} {text!r} has no word before the =; write WORD=VALUE"
            raise MergeError(message, code="invalid_value", key=key)
    return rules[0]["value"] if len(rules) == 1 and rules[0]["filter"] == "*" else rules


def _value(text: str) -> Any:
    try:
        return parse_yaml(text)
    except MergeError:
        return text
