"""Kinds of stages: the command that each runs, what it leaves, and what its settings must have."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_algos.jobs.methods import METHODS
from rlhf_algos.pipeline.references import Reference
from rlhf_data import UserError, remove_folder
from rlhf_models import CompressionSettings

SETTINGS = "settings.json"
"""Settings of a stage, with paths in place of references; in its folder."""
Command = Callable[[Path, dict[str, Any]], tuple[str, list[str]]]
"""Given a stage's folder and settings, the module that runs it and its arguments, which continue what an
interrupted process left."""


@dataclass(frozen=True)
class StageKind:
    """Description of a stage of this kind.

    Args:
        command: what it runs.
        outputs: paths in its folder by the names that references use; `*` stands for any name.
        content: files and folders whose content is the result: what is hashed, and the same on every run.
        required: keys that its settings must have.
        allowed: all keys that they may have; None where `check` or the command knows them.
        check: refuses wrong settings with a UserError, given them and the words for where they stand.
        done: file whose presence means that the process finished.
        seed: the key of its seed.
        launchable: whether it can run in several processes.
        promoted: the output that takes a role; `candidate` is the gate's setting of that name.
        packages: further packages that its process imports or starts, with what pip calls them.
    """

    command: Command
    outputs: Mapping[str, str]
    content: tuple[str, ...]
    required: tuple[str, ...] = ()
    allowed: tuple[str, ...] | None = None
    check: Callable[[dict[str, Any], str], Any] | None = None
    done: str | None = None
    seed: str | None = None
    launchable: bool = False
    promoted: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)

    def path_of(self, reference: Reference) -> str:
        """Where in a stage's folder an output is.

        Raises:
            ValueError: there is no such output.
        """
        if reference.output is None:
            return "."
        if reference.output in self.outputs:
            return self.outputs[reference.output]
        if "*" in self.outputs:
            return self.outputs["*"].replace("*", reference.output)
        raise ValueError(f"{reference} is nothing that the stage leaves; it leaves {', '.join(self.outputs)}")

    def check_settings(self, settings: dict[str, Any], where: str) -> None:
        """Refuse settings that the command would refuse, as far as that is known without running it.

        Raises:
            UserError: a key is missing or unknown, a value is refused, or a package is not installed.
        """
        for package, name in self.packages.items():
            if importlib.util.find_spec(package) is None:
                raise UserError(
                    f'{where}: {package} is not installed; run pip install "{name}"',
                    code="missing_package",
                    package=package,
                )
        for key in self.required:
            if settings.get(key) in (None, "", [], {}):
                raise UserError(
                    f"{where}: key {key} is missing; give it a value", code="missing_key", key=key
                )
        if self.allowed is not None:
            _check_keys(settings, self.allowed, where)
        if self.check is not None:
            self.check(settings, where)


def _check_keys(settings: Mapping[str, Any], allowed: Sequence[str], where: str) -> None:
    for key in settings:
        if key not in allowed:
            raise UserError(
                f"{where}: unknown key {key}; valid keys are {', '.join(allowed)}",
                code="unknown_key",
                key=key,
            )


def options(settings: Mapping[str, Any]) -> list[str]:
    """Command-line options: a list repeats its option, true is a flag, null and false are none."""
    found: list[str] = []
    for key, value in settings.items():
        option = f"--{key.replace('_', '-')}"
        for each in value if isinstance(value, list | tuple) else (value,):
            if each is not None and each is not False:
                found += [option] if each is True else [option, str(each)]
    return found


def _training(command: str) -> Command:
    """A command of `rlhf-train` with a run folder, `run`, which is continued once it has a config."""

    def command_of(folder: Path, settings: dict[str, Any]) -> tuple[str, list[str]]:
        del settings
        run = folder / "run"
        if (run / "config.json").exists():
            return "rlhf_train", [command, "--resume", str(run)]
        if run.exists():  # ended before it had begun
            remove_folder(run)
        return "rlhf_train", [command, "--config", str(folder / SETTINGS), "--output-dir", str(run)]

    return command_of


def _data(folder: Path, settings: dict[str, Any]) -> tuple[str, list[str]]:
    rows = folder / "rows"
    if "input" not in settings:
        names = {"rows": "rows", "world": "kind", "seed": "seed"}
        given = options({names[key]: value for key, value in settings.items()})
        return "rlhf_train", ["dummy-data", str(rows), *given]
    inputs = settings["input"] if isinstance(settings["input"], list) else [settings["input"]]
    given = options({key: value for key, value in settings.items() if key != "input"})
    return "rlhf_report", ["prepare", *map(str, inputs), "--out", str(rows), "--overwrite", *given]


def _check_data(settings: dict[str, Any], where: str) -> None:
    _check_keys(
        settings, ("input", *PREPARE_KEYS) if "input" in settings else ("rows", "world", "seed"), where
    )


def _generate(folder: Path, settings: dict[str, Any]) -> tuple[str, list[str]]:
    # Where nothing ranks the candidates the commonest one is taken, of one candidate that one.
    unranked = {} if settings.get("reward") else {"selection": "majority"}
    return _sampling("generate", folder, unranked | settings)


def _refine(folder: Path, settings: dict[str, Any]) -> tuple[str, list[str]]:
    unscored = {} if settings.get("reward") else {"keep": "last"}
    return _sampling("refine", folder, unscored | settings)


def _compress(folder: Path, settings: dict[str, Any]) -> tuple[str, list[str]]:
    given = dict(settings)
    return _over_rows("compress", folder, given.pop("rows"), given)


def _sampling(command: str, folder: Path, settings: dict[str, Any]) -> tuple[str, list[str]]:
    """A command of `rlhf-serve` that writes rows of completions."""
    given = dict(settings)
    prompts = given.pop("prompts")
    if isinstance(given.get("reward"), str):
        given["reward"] = [given["reward"]]
    return _over_rows(command, folder, prompts, given)


def _over_rows(command: str, folder: Path, rows: Any, given: Mapping[str, Any]) -> tuple[str, list[str]]:
    """A command of `rlhf-serve` over a file of rows."""
    paths = ["--input", str(rows), "--output", str(folder / "rows.jsonl")]
    listed = options({"set": [f"{key}={json.dumps(value)}" for key, value in given.items()]})
    return "rlhf_serve", [command, *paths, *listed]


def _evaluate(folder: Path, settings: dict[str, Any]) -> tuple[str, list[str]]:
    given = dict(settings)
    named = {role: f"{role}={given.pop(role)}" for role in ("reference",) if given.get(role)}
    given = {"model": f"policy={given.pop('model')}", **named, **given}
    return "rlhf_report", ["evaluate", *options(given), "--output-dir", str(folder / "report")]


def _capability(folder: Path, settings: dict[str, Any]) -> tuple[str, list[str]]:
    return "rlhf_report", ["capability", *options(settings), "--output-dir", str(folder / "report")]


def _merge(folder: Path, settings: dict[str, Any]) -> tuple[str, list[str]]:
    del settings
    return "rlhf_merge", ["run", str(folder / SETTINGS), str(folder / "model")]


def _step(name: str) -> Command:
    def command_of(folder: Path, settings: dict[str, Any]) -> tuple[str, list[str]]:
        del settings
        return "rlhf_algos.pipeline.steps", [name, str(folder)]

    return command_of


PREPARE_KEYS = (
    *("kind", "columns", "tokenizer", "against", "ties", "min_words", "duplicate_rows", "duplicate_prompts"),
    *("near_threshold", "near_unit", "near_size", "contradictions", "margins", "tie_similarity"),
    *("min_tokens", "max_length", "truncation", "convert", "eval_fraction", "stratify_by", "strata"),
    *("source_column", "group_prompts", "contamination_words", "seed", "on_bad_row"),
)
_SAMPLING_KEYS = (
    *("prompts", "model", "reward", "reward_weights"),
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "sampling_seed"),
    *("batch_size", "backend", "dtype", "device", "chat_template", "max_batch_tokens"),
)
_GENERATE_KEYS = (*_SAMPLING_KEYS, "n", "keep", "selection", "budget", "stop_early", "answer")
_REFINE_KEYS = (
    *(*_SAMPLING_KEYS, "critic", "critic_max_tokens", "principles", "rounds", "until", "keep", "min_gain"),
    *("verdict", "templates"),
)
EVALUATE_KEYS = (
    *("model", "reference", "prompts", "reward_model", "held_out_reward", "judge", "judge_labels", "pairs"),
    *("adversarial", "num_prompts", "winrate_prompts", "samples", "max_new_tokens", "temperature", "seed"),
    *("gen_batch_size", "dtype", "no_kl", "on_bad_row"),
    *("backend", "vllm_server", "vllm_gpu_memory_utilization"),
)
_SERVE_KEYS = (
    *("model", "prompts", "rows", "max_tokens", "temperature", "reward_model", "n", "backend"),
    *("dtype", "device", "chat_template", "draft", "draft_model"),
)
_COMPRESS_KEYS = (
    *("rows", "model", "text_key", "question_key", "protect", "batch_size", "dtype", "device"),
    *CompressionSettings.model_fields,
)
LM_EVAL_OPTIONS = ("num_fewshot", "limit", "gen_kwargs", "include_path", "seed")
"""Settings of a stage of kind lm_eval that are lm-eval's options."""
FILTERS = ("pairs", "sft", "kto")
"""Outputs that a filter stage makes of completions."""


def _check_filter(settings: dict[str, Any], where: str) -> None:
    if settings["to"] not in FILTERS:
        raise UserError(
            f"{where}: to is {settings['to']!r}; expected one of {', '.join(FILTERS)}",
            code="invalid_value",
            key="to",
        )


def _check_serve(settings: dict[str, Any], where: str) -> None:
    for key in ("rows", "max_tokens"):
        value = settings.get(key, 1)
        if type(value) is not int or value < 1:
            raise UserError(
                f"{where}: {key} is {value!r}; expected a whole number of at least 1",
                code="invalid_value",
                key=key,
            )
    if settings.get("n", 1) != 1 and not settings.get("temperature"):
        raise UserError(
            f"{where}: n is {settings['n']!r}, but at temperature 0 all candidates are the same; set "
            "temperature too",
            code="invalid_value",
            key="n",
        )


def _check_compress(settings: dict[str, Any], where: str) -> None:
    given = {key: value for key, value in settings.items() if key in CompressionSettings.model_fields}
    chosen = CompressionSettings.from_dict(given, where)
    try:
        chosen.check(asked=bool(settings.get("question_key")))
    except UserError as error:
        raise UserError(f"{where}: {error}", code=error.code, **error.fields) from error


def _method_check(method: str) -> Callable[[dict[str, Any], str], Any]:
    return lambda settings, where: METHODS[method].resolve(settings, where=where)


def _rows_kind(command: Command, **rest: Any) -> StageKind:
    """A kind that leaves a file of rows."""
    return StageKind(command=command, outputs={"rows": "rows.jsonl"}, content=("rows.jsonl",), **rest)


def _training_kind(
    name: str, outputs: Mapping[str, str], check: Callable[[dict[str, Any], str], Any] | None = None
) -> StageKind:
    """A kind that trains by a command of `rlhf-train`."""
    return StageKind(
        command=_training(name),
        outputs=outputs,
        content=("run/final",),
        check=check,
        done="run/results.json",
        seed="seed",
        launchable=True,
        promoted="final",
    )


KINDS: dict[str, StageKind] = {
    "data": StageKind(
        command=_data,
        outputs={"*": "rows/*.jsonl"},
        content=("rows",),
        check=_check_data,
        done="rows",
        seed="seed",
    ),
    **{
        name: _training_kind(
            name,
            {"final": "run/final", "run": "run", "metrics": "run/metrics.jsonl"},
            _method_check(name),
        )
        for name in METHODS
    },
    "minmax": _training_kind(
        "minmax", {"final": "run/final/policy", "monitor": "run/final/monitor", "run": "run"}
    ),
    "generate": _rows_kind(
        command=_generate, required=("prompts", "model"), allowed=_GENERATE_KEYS, seed="sampling_seed"
    ),
    "refine": _rows_kind(
        command=_refine, required=("prompts", "model"), allowed=_REFINE_KEYS, seed="sampling_seed"
    ),
    "compress": _rows_kind(
        command=_compress,
        required=("rows", "model"),
        allowed=_COMPRESS_KEYS,
        check=_check_compress,
        packages={"rlhf_serve": "rlhf-serve"},
    ),
    "score": _rows_kind(command=_step("score"), required=("rows", "reward"), allowed=("rows", "reward")),
    "filter": _rows_kind(
        command=_step("filter"),
        required=("rows", "to"),
        allowed=("rows", "to", "chosen", "rejected", "min_gap", "min_score", "top_share"),
        check=_check_filter,
    ),
    "evaluate": StageKind(
        command=_evaluate,
        outputs={"report": "report"},
        content=("report/completions",),
        required=("model", "prompts"),
        allowed=EVALUATE_KEYS,
        seed="seed",
    ),
    "capability": StageKind(
        command=_capability,
        outputs={"report": "report"},
        content=("report/items.jsonl",),
        required=("model",),
        allowed=("model", "suite", "file", "rows", "max_new_tokens", "dtype"),
        done="report/results.json",
    ),
    "lm_eval": StageKind(
        command=_step("lm_eval"),
        outputs={"report": "report"},
        content=("report/items.jsonl",),
        required=("model", "tasks"),
        allowed=("model", "tasks", "metric", "dtype", *LM_EVAL_OPTIONS),
        done="report/results.json",
        packages={"rlhf_report": "rlhf-report[harness]", "lm_eval": "rlhf-report[harness]"},
    ),
    "gate": StageKind(
        command=_step("gate"),
        outputs={"verdict": "verdict.json"},
        content=("verdict.json",),
        required=("candidate", "measured"),
        allowed=("candidate", "measured", "start", "baseline"),
        promoted="candidate",
    ),
    "serve": _rows_kind(
        command=_step("serve"),
        required=("model", "prompts"),
        allowed=_SERVE_KEYS,
        check=_check_serve,
        packages={"rlhf_serve": "rlhf-serve"},
    ),
    "merge": StageKind(
        command=_merge,
        outputs={"final": "model"},
        content=("model",),
        required=("method", "models"),
        done="model",
        promoted="final",
    ),
}
"""Every kind, by its name; a method of `METHODS` is one."""
