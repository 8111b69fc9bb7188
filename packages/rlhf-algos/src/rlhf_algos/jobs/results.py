"""Outputs of a finished run: results.json, training curves, and the model card for the hub."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rlhf_algos.jobs.methods import METHODS
from rlhf_algos.tracking.run_facts import versions
from rlhf_data import RunFolder, atomic_write_text, finite, settings_command

_LOG = logging.getLogger(__name__)
_PACKAGES = (
    "rlhf-algos",
    "rlhf-data",
    "rlhf-infer",
    "rlhf-models",
    "accelerate",
    "peft",
    "torch",
    "transformers",
)
_FINAL = "final"
_HUB_NAME = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*")
_RECIPE = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "max_grad_norm"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps"),
    *("max_length", "num_generations", "max_completion_length", "temperature"),
    *("num_members", "ensemble", "use_peft", "lora_r", "lora_alpha", "seed"),
)
"""Settings in the table, beside those that only the method has; all of them are listed below it."""
_CUT = "..."
"""Stands for the beginning of a local path."""
_OPTIONS = {
    "model_name_or_path": "--model",
    "model_config": "--model-config",
    "train_data": "--train-data",
    "eval_data": "--eval-data",
    "seed": "--seed",
}
_GENERATE = """\
{imports}

model = {model_class}.from_pretrained("{place}")
tokenizer = AutoTokenizer.from_pretrained("{place}")
inputs = tokenizer("Where is Mary?", return_tensors="pt")
tokens = model.generate(**inputs, max_new_tokens=32)
print(tokenizer.decode(tokens[0], skip_special_tokens=True))"""
_SCORE = """\
from rlhf_models import {model_class}

model = {model_class}.from_pretrained("{place}")
print(model.{call})"""
_SCORE_TEXTS = 'score(["Where is Mary?"], ["In the kitchen."])'
_SCORE_STEPS = 'score_steps("Where is Mary?", ["Mary went to the kitchen.", "So she is in the kitchen."])'


def finish_run(
    run: RunFolder,
    *,
    method: str,
    config: Mapping[str, Any],
    before: Mapping[str, float] | None,
    after: Mapping[str, float] | None,
    wall_time: Mapping[str, float],
    **facts: Any,
) -> dict[str, Any]:
    """Write `training_curves.png`, the model card of `final/`, then `results.json`: the run is finished.

    Args:
        run: the run's folder, with its metrics.jsonl; without `final/` no card is written.
        method: its name, as in `METHODS`.
        config: the resolved settings.
        before: held-out metrics of the start model; None without held-out rows.
        after: held-out metrics of the trained model.
        wall_time: seconds by part; `training` and `total` among them.
        **facts: further JSON values for results.json; they precede the others.

    Returns:
        What was written: `method`, `before`, `after`, `last_step` (the last line of metrics.jsonl), `steps`,
        `num_tokens`, `tokens_per_second` (tokens of this process's training over its time; of a resumed run,
        None), `samples_per_second` (the median over the steps), `peak_memory_gb` (the most of any step),
        `wall_time`, `versions`, and the facts.

    Raises:
        DiskFullError: nothing can be added to the disk; the run is not marked as finished.
    """
    from rlhf_eval import can_draw, metric_keys, training_curves

    rows = run.read_metrics()
    last = rows[-1] if rows else {}
    seconds = wall_time.get("training")
    tokens = facts.get("num_tokens", last.get("num_tokens"))
    whole = bool(seconds and tokens) and not facts.get("resumed")
    results = {
        "method": method,
        "before": dict(before) if before else None,
        "after": dict(after) if after else None,
        "last_step": last,
        "steps": last.get("step", 0),
        "num_tokens": tokens,
        "tokens_per_second": tokens / seconds if whole and tokens and seconds else None,
        "samples_per_second": _summary(median, rows, "samples_per_second"),
        "peak_memory_gb": _summary(max, rows, "peak_memory_gb"),
        "wall_time": dict(wall_time),
        "versions": versions(_PACKAGES),
        **facts,
    }
    if (keys := metric_keys(rows)) and not can_draw():
        _LOG.info("training_curves.png is not drawn: matplotlib is missing; pip install 'rlhf-algos[plots]'")
    elif keys:
        name = run.path.resolve().name
        training_curves(rows, keys, run.path / "training_curves.png", title=_title(method, name))
    if (run.path / _FINAL).is_dir():
        write_model_card(run.path / _FINAL, method=method, config=config, results=results)
    run.write_results(results)
    return results


def _title(method: str, name: str) -> str:
    return method if name == method else f"{method}: {name}"


def _summary(
    how: Callable[[list[float]], float], rows: Sequence[Mapping[str, Any]], key: str
) -> float | None:
    """Of a metric's values over the steps; None if no step has one."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return how(values) if values else None


@dataclass(frozen=True)
class _Kind:
    """The kind of a saved model, and how to load it."""

    task: str
    library: str
    model_class: str
    call: str = ""
    note: str = ""

    def code(self, place: str) -> str:
        """How to load and use it from a folder."""
        if self.call:
            return _SCORE.format(model_class=self.model_class, place=place, call=self.call)
        imports = f"from transformers import {self.model_class}, AutoTokenizer"
        if self.library == "peft":
            imports = f"from peft import {self.model_class}\nfrom transformers import AutoTokenizer"
        return _GENERATE.format(imports=imports, model_class=self.model_class, place=place)


def write_model_card(
    folder: str | Path,
    *,
    method: str,
    config: Mapping[str, Any],
    results: Mapping[str, Any] | None = None,
    base_model: str | None = None,
    data: str | None = None,
) -> None:
    """Write a saved model's `README.md`: what it is, how to load it, held-out metrics, recipe, versions.

    The header has `base_model` (where that is a name on the hub rather than a path), `library_name`,
    `pipeline_tag` and `tags`. Cards are published, so of local paths only the last two names are shown.

    Args:
        folder: the saved model; its files say what kind it is.
        method: how it was trained, a key of `METHODS` or any other name.
        config: the resolved settings, JSON values.
        results: as `finish_run` writes them; its `before`, `after`, `steps`, `num_tokens`, `wall_time`,
            `data` and `versions` are used, and each may be missing.
        base_model: what training started from; None takes `model_name_or_path` of the settings.
        data: what it was trained on; None takes `train_data` of the settings.

    Raises:
        DiskFullError: nothing can be added to the disk.
    """
    folder, results = Path(folder), results or {}
    base = base_model or config.get("model_name_or_path")
    config = _without_places(config)
    data = _without_places(data) or config.get("train_data") or (results.get("data") or {}).get("source")
    kind = _kind(folder, method)
    sections = [
        _header(kind, method, base),
        f"# {folder.resolve().parent.name if folder.name == 'final' else folder.resolve().name}",
        _card_summary(method, _without_places(base), data, kind),
        f"## Use\n\n```python\n{kind.code('path/to/this/folder')}\n```",
        kind.note,
        _held_out(results),
        _recipe(method, config, results),
        _command(method, config),
        _versions(results),
    ]
    atomic_write_text(folder / "README.md", "\n\n".join(section for section in sections if section) + "\n")


def _without_places(value: Any) -> Any:
    """Settings with what leads to a local file or folder replaced by `...`, but for its folder's name."""
    if isinstance(value, Mapping):
        return {key: _without_places(each) for key, each in value.items() if key != "run_folder"}
    if isinstance(value, list | tuple):
        return [_without_places(each) for each in value]
    if not isinstance(value, str) or not Path(value).is_absolute():
        return value
    return "/".join((_CUT, *Path(value).parts[1:][-2:]))


def _kind(folder: Path, method: str) -> _Kind:
    """Read off a saved model's files what it is."""
    adapter = (folder / "adapter_config.json").is_file()
    library = "peft" if adapter else "transformers"
    if (folder / "ensemble_config.json").is_file():
        return _Kind("text-classification", library, "RewardEnsemble", _SCORE_TEXTS)
    note = "" if adapter or "score_head" in _model_config(folder) else "`transformers.{}` loads it too."
    model = METHODS[method].model if method in METHODS else "policy"
    if model == "prm":
        auto = note.format("AutoModelForTokenClassification")
        return _Kind("token-classification", library, "ProcessRewardModel", _SCORE_STEPS, auto)
    if model in ("reward", "judge"):
        auto = note.format("AutoModelForSequenceClassification")
        name = "RewardModel" if model == "reward" else "JudgeModel"
        return _Kind("text-classification", library, name, _SCORE_TEXTS, auto)
    return _Kind(
        "text-generation", library, "AutoPeftModelForCausalLM" if adapter else "AutoModelForCausalLM"
    )


def _model_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _header(kind: _Kind, method: str, base: str | None) -> str:
    tags = ["rlhf-algos", method, *(["lora"] if kind.library == "peft" else [])]
    lines = [f"base_model: {base}"] if _on_hub(base) else []
    lines += [f"library_name: {kind.library}", f"pipeline_tag: {kind.task}", "tags:"]
    return "\n".join(["---", *lines, *(f"- {tag}" for tag in tags), "---"])


def _on_hub(base: str | None) -> bool:
    """Whether a name can be one on the hub, where a card may link to it; paths cannot."""
    return base is not None and _HUB_NAME.fullmatch(base) is not None and not Path(base).exists()


def _card_summary(method: str, base: str | None, data: str | None, kind: _Kind) -> str:
    known = METHODS.get(method)
    name = known.title or method if known else method
    if known and known.paper:
        name += f" ([arXiv:{known.paper}](https://arxiv.org/abs/{known.paper}))"
    what = "LoRA adapter" if kind.library == "peft" else "Model"
    start = f" from `{base}`" if base else ""
    rows = f" on {data}" if data and " " in data else f" on `{data}`" if data else ""
    return f"{what} trained with {name}{start}{rows}."


def _held_out(results: Mapping[str, Any]) -> str:
    before, after = results.get("before") or {}, results.get("after") or {}
    names = [name for name in after if isinstance(after[name], int | float)]
    if not names:
        return ""
    lines = [f"| {name} | {_number(before.get(name))} | {_number(after[name])} |" for name in names]
    return "\n".join(["## Held-out metrics", "", "| metric | before | after |", "|---|---|---|", *lines])


def _command(method: str, config: Mapping[str, Any]) -> str:
    """The command that trains with the same settings, where they are those of a command."""
    known = METHODS.get(method)
    usual = known.defaults(config) if known else {}
    if not usual or not usual.keys() <= config.keys():
        return ""
    command = settings_command(f"rlhf-train {method}", config, usual, _OPTIONS)
    paths = f", with folders of your own in place of `{_CUT}`" if f"{_CUT}/" in command else ""
    return f"The same training again{paths}:\n\n```\n{command}\n```"


def _recipe(method: str, config: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    shown = dict.fromkeys((*_RECIPE, *_own_settings(method)))
    rows = {name: config[name] for name in shown if config.get(name) is not None}
    meaningless = ["max_steps" if rows.get("max_steps") == -1 else "num_train_epochs"]
    meaningless += [] if rows.get("use_peft") else ["lora_r", "lora_alpha"]
    meaningless += ["num_members", "ensemble"] if rows.get("num_members") == 1 else []
    rows = {name: value for name, value in rows.items() if name not in meaningless}
    rows |= {
        name: results[key] for name, key in (("steps", "steps"), ("tokens", "num_tokens")) if results.get(key)
    }
    if total := (results.get("wall_time") or {}).get("total"):
        rows["wall time in seconds"] = round(total, 1)
    table = [f"| {name} | {_number(value)} |" for name, value in rows.items()]
    settings = json.dumps(finite(dict(config)), indent=2, ensure_ascii=False)
    details = ["<details><summary>All settings</summary>", "", f"```json\n{settings}\n```", "", "</details>"]
    return "\n".join(["## Recipe", "", "| setting | value |", "|---|---|", *table, "", *details])


def _own_settings(method: str) -> list[str]:
    """The settings that a method's config adds to the class that it extends."""
    if method not in METHODS:
        return []
    config = METHODS[method].config_class
    inherited = {name for base in config.__mro__[1:] for name in getattr(base, "model_fields", ())}
    return [name for name in config.model_fields if name not in inherited]


def _versions(results: Mapping[str, Any]) -> str:
    found = results.get("versions") or {}
    return (
        "\n".join(["## Versions", "", *(f"- {name} {number}" for name, number in found.items())])
        if found
        else ""
    )


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value).replace("\n", "\\n")
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
