"""Model soups: the mean of several fine-tunes of one model, all of them or those that help."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf_merge.config.merge_config import MergeConfig
from rlhf_merge.errors import MergeError
from rlhf_merge.files.checkpoint import open_checkpoint
from rlhf_merge.files.writer import check_output, explained, locked, write_json
from rlhf_merge.methods.blocks import Begin, OnBytes
from rlhf_merge.run.matching import uneven
from rlhf_merge.run.merger import MergeResult, ModelMerger, Resources

Evaluate = Callable[[Path], float]
"""Scores the model in a folder."""


@dataclass(frozen=True)
class Trial:
    """One model or soup that was scored, and whether it became the soup so far."""

    members: tuple[str, ...]
    score: float
    accepted: bool


@dataclass(frozen=True)
class SoupResult:
    """A greedy soup.

    Args:
        folder: the model.
        members: the models in it.
        score: of the soup.
        trials: everything that was scored, in order: first each model alone, then the soups.
    """

    folder: Path
    members: tuple[str, ...]
    score: float
    trials: tuple[Trial, ...]


@dataclass
class ModelSoup:
    """The mean of models. Wortsman et al. (2022), Model soups, arXiv:2203.05482.

    Args:
        models: two or more, as folders, hub ids or either with `+adapter`.
        settings: further keys of a linear `MergeConfig`: base, dtype, vocab, ignore.
        resources: threads and memory.

    Raises:
        MergeError: fewer than two models, or a key that a linear merge does not have.
    """

    models: Sequence[str]
    settings: dict[str, Any] = field(default_factory=dict)
    resources: Resources | None = None

    def __post_init__(self) -> None:
        """Check the models and settings."""
        if len(self.models) < 2:
            message = f"a soup needs at least two models, got {len(self.models)}; add some"
            raise MergeError(message, code="too_few_models")
        if len(set(self.models)) < len(self.models):
            message = "a soup has each model once; a model that counts twice needs a weight in `linear`"
            raise MergeError(message, code="repeated_model")
        self._config(self.models)

    def uniform(
        self, out: str | Path, *, restart: bool = False, on_bytes: OnBytes | None = None
    ) -> MergeResult:
        """The mean of all models (section 2, uniform soup); see `ModelMerger.merge`.

        Args:
            out: the folder to make.
            restart: discard what an interrupted merge left.
            on_bytes: called with bytes read and written.
        """
        return self._merger(self.models).merge(out, restart=restart, on_bytes=on_bytes)

    def greedy(
        self,
        out: str | Path,
        evaluate: Evaluate | str,
        *,
        higher_is_better: bool = True,
        restart: bool = False,
        on_trial: Callable[[Trial], None] | None = None,
        on_merge: Begin | None = None,
    ) -> SoupResult:
        """The greedy soup (section 2, recipe 1).

        The models are scored one by one; then, from the best to the worst, each is added to the soup if the
        soup's score does not become worse. Those that a command gave are kept beside `out` until the end: an
        interrupted soup does not repeat them.

        Args:
            out: the folder to make.
            evaluate: a function of a model's folder, or a shell command that has `{model}` in the folder's
                place and whose last printed word is the score.
            higher_is_better: whether a greater score is a better one.
            restart: discard what an interrupted soup left, its scores too.
            on_trial: called with every score.
            on_merge: called with the bytes of a merge as it begins; what it returns is called with the bytes
                that are done.

        Raises:
            MergeError: the command fails or prints no number, a score is not finite, or see
                `ModelMerger.merge`.
        """
        out = Path(out).absolute()
        check_output(out)
        plan = self._merger(self.models).plan()  # models that do not fit are refused before any is scored
        plan.close()
        plan.check_outside(out)
        trials: list[Trial] = []

        def note(members: tuple[str, ...], score: float, accepted: bool) -> None:
            trials.append(Trial(members, score, accepted))
            if on_trial is not None:
                on_trial(trials[-1])

        sign = 1 if higher_is_better else -1
        with _Scores(self, out, evaluate, on_merge, restart) as scores:
            for model in self.models:
                note((model,), scores.of((model,)), False)
            first, *others = sorted(self.models, key=lambda model: -sign * scores.of((model,)))
            members, best = (first,), scores.of((first,))
            trials = [replace(trial, accepted=trial.members == members) for trial in trials]
            for model in others:
                score = scores.of((*members, model))
                accepted = sign * score >= sign * best
                note((*members, model), score, accepted)
                if accepted:
                    members, best = (*members, model), score
            notes = {"members": members, "score": best, "trials": [vars(trial) for trial in trials]}
            scores.merge(members, out, restart, {"soup.json": json.dumps(notes, indent=2) + "\n"})
            scores.forget()
        return SoupResult(out, members, best, tuple(trials))

    @property
    def config(self) -> MergeConfig:
        """The config of the uniform soup."""
        return self._config(self.models)

    def _config(self, members: Sequence[str], **changes: Any) -> MergeConfig:
        values = {**self.settings, **changes, "method": "linear", "models": list(members)}
        return MergeConfig.from_dict(values, "soup")

    def _merger(self, members: Sequence[str]) -> ModelMerger:
        config = self._config(members)
        if config.ignore and len(members) < len(self.models):
            # Some members may all have, or all lack, what only some of the models have.
            with ExitStack() as opened:
                checkpoints = {
                    spec: opened.enter_context(open_checkpoint(spec)) for spec in config.model_specs
                }
                config = self._config(members, ignore=uneven(checkpoints, config.ignore))
        return ModelMerger(config, resources=self.resources)


class _Scores:
    """Scores models and soups once each; those that a command gave are remembered on disk, beside `out`."""

    def __init__(
        self, soup: ModelSoup, out: Path, evaluate: Evaluate | str, on_merge: Begin | None, restart: bool
    ):
        self._soup, self._on_merge = soup, on_merge
        command = evaluate if isinstance(evaluate, str) else ""
        self._evaluate = shell_evaluation(evaluate) if isinstance(evaluate, str) else evaluate
        self._root = out.parent / f".{out.name}.soup"
        self._file = self._root / "scores.json"
        with explained(out):
            self._root.mkdir(parents=True, exist_ok=True)
            self._lock = locked(self._root / "lock", out)
        identity = {}
        for model in soup.models:
            with open_checkpoint(model) as checkpoint:
                identity[model] = [list(part) for part in checkpoint.identity]
        self._known: dict[str, Any] = {"models": identity, "settings": soup.settings, "evaluate": command}
        self._known["scores"] = {}
        if command and self._file.exists() and not restart:
            known = json.loads(self._file.read_text(encoding="utf-8"))
            if {**known, "scores": {}} == self._known:
                self._known = known

    def __enter__(self) -> _Scores:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._root / "candidate", ignore_errors=True)
        if not self._known["scores"]:
            self.forget()
        self._lock.close()

    def merge(
        self, members: tuple[str, ...], out: Path, restart: bool, files: dict[str, str] | None = None
    ) -> Path:
        """Merge the mean of models into a folder."""
        merger = self._soup._merger(members)
        plan = merger.plan()
        on_bytes = self._on_merge(plan.bytes_read + plan.bytes_written) if self._on_merge else None
        return merger.merge(out, restart=restart, on_bytes=on_bytes, plan=plan, files=files).folder

    def of(self, members: tuple[str, ...]) -> float:
        """The score of a model, or of the mean of several."""
        key, scores = json.dumps(members), self._known["scores"]
        if key not in scores:
            given: Any = self._evaluate(self._folder(members))
            try:
                value = float(given)
            except (TypeError, ValueError):
                value = math.nan
            if not math.isfinite(value):
                message = f"the evaluation of {' + '.join(members)} gave {given!r}, expected a finite number"
                raise MergeError(message, code="invalid_score")
            scores[key] = value
            write_json(self._file, self._known)
        return scores[key]

    def forget(self) -> None:
        """Remove what was remembered."""
        shutil.rmtree(self._root, ignore_errors=True)

    def _folder(self, members: tuple[str, ...]) -> Path:
        """A folder with the model; one without adapters is its own."""
        if len(members) == 1:
            with open_checkpoint(members[0]) as checkpoint:
                if not checkpoint.adapter_folders:
                    return checkpoint.folder
        candidate = self._root / "candidate"
        shutil.rmtree(candidate, ignore_errors=True)
        return self.merge(members, candidate, True)


def shell_evaluation(command: str) -> Evaluate:
    """A shell command with `{model}` where a folder belongs, as a function; the last word is the score."""
    if "{model}" not in command:
        message = f"the evaluation {command!r} has no {{model}}, where the folder would be put; add it"
        raise MergeError(message, code="missing_placeholder")

    def evaluate(folder: Path) -> float:
        filled = command.replace("{model}", shlex.quote(str(folder)))
        run = subprocess.run(filled, shell=True, capture_output=True, text=True)
        if run.returncode != 0:
            said = (run.stderr.strip() or run.stdout.strip() or "nothing").splitlines()[-1]
            message = f"the evaluation {command!r} ended with {run.returncode} and said: {said}"
            raise MergeError(message, code="evaluation_failed", status=run.returncode)
        words = run.stdout.split()
        try:
            return float(words[-1])
        except (IndexError, ValueError):
            last = repr(words[-1]) if words else "nothing"
            message = f"the evaluation {command!r} must print a number last, but printed {last}"
            raise MergeError(message, code="invalid_score") from None

    return evaluate
