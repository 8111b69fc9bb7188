"""Checkpoints that a killed run can always resume from, and nothing in them pickled.

Covered: a kill at any moment (a checkpoint appears whole or not at all); a checkpoint damaged afterwards (it
is passed over for the one before it); a full disk (the checkpoints that were there stay as they are).
Not covered: a damaged file whose damage leaves its CRC-32 as it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from rlhf_algos.checkpoints.optimizer_state import load_optimizer_state as load_optimizer_state
from rlhf_algos.checkpoints.optimizer_state import load_rng_state as load_rng_state
from rlhf_algos.checkpoints.optimizer_state import save_optimizer_state as save_optimizer_state
from rlhf_algos.checkpoints.optimizer_state import save_rng_state as save_rng_state
from rlhf_algos.process_group import barrier, broadcast, is_main_process
from rlhf_algos.tracking.early_stopping import is_greater_better
from rlhf_data import (
    RunFolder,
    UserError,
    atomic_folder,
    atomic_write_json,
    current_names,
    finite,
    write_checksums,
)
from rlhf_models import ADAPTER_CONFIG, save_weights
from rlhf_models.adapters.files import anchor_base
from rlhf_models.loading.replacing import replacing_weights

STATE_FILE = "trainer_state.json"
"""Written last, so that a checkpoint folder that has it was complete."""


class CheckpointManager:
    """Rolling checkpoints of a run folder, the best one among them kept.

    Args:
        run: the run folder.
        keep: how many of the newest checkpoints stay, in addition to the best one; None keeps all.
        metric: which of the metrics given to `writing` says what is best; None knows no best one.
        greater_is_better: whether more of it is better; None takes it from the metric's name.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        keep: int | None = None,
        metric: str | None = None,
        greater_is_better: bool | None = None,
    ) -> None:
        self.run, self.keep, self.metric = run, keep, metric
        more = is_greater_better(metric or "") if greater_is_better is None else greater_is_better
        self._sign = 1 if more else -1
        self._last: int | None = None
        self.pinned: int | None = None
        """Step of a checkpoint that is kept however old it is."""

    @contextmanager
    def writing(
        self, step: int, state: dict[str, Any], *, metrics: Mapping[str, Any] | None = None
    ) -> Iterator[Path]:
        """Yield a folder for model and optimizer files; it becomes the checkpoint when the block ends.

        Then those are removed that training did not come from (of later steps, or passed over by `latest`),
        and old ones beyond `keep`.

        Args:
            step: optimizer steps done.
            state: what else resuming needs, JSON values; written last, with `step` added.
            metrics: what was measured at this step.  They are kept as `log_history`; where they have
                `metric`, `best_metric`, `best_global_step` and `best_model_checkpoint` (a folder's name) say
                which checkpoint is the best so far, the earlier one where two are equal.

        Yields:
            A temporary folder.  When the block raises, nothing is left of it.

        Raises:
            DiskFullError: nothing can be added to the disk; the checkpoints that were there are intact.
        """
        with atomic_folder(self.run.checkpoint_path(step)) as folder:
            yield folder
            values = finite({"step": step, **state, **self._log(step, dict(metrics or {}))})
            atomic_write_json(folder / STATE_FILE, values)
            write_checksums(folder)
        self.run.drop_checkpoints_after(step if self._last is None else min(self._last, step), but=step)
        self._last = step
        if self.keep is not None:
            best = values.get("best_global_step")
            self.run.prune_checkpoints(self.keep, best=best, pinned=self.pinned)

    @contextmanager
    def writing_together(
        self, step: int, state: dict[str, Any], *, metrics: Mapping[str, Any] | None = None
    ) -> Iterator[Path]:
        """Do what `writing` does for all processes of a job, each of which gets the folder of the first."""
        with ExitStack() as stack:
            folder = Path()
            if is_main_process():
                folder = stack.enter_context(self.writing(step, state, metrics=metrics))
            yield Path(broadcast(str(folder)))
            barrier()
        barrier()

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or None; damaged ones are skipped with a warning.

        Raises:
            UserError: there are checkpoints, and each of them is damaged.
        """
        latest = self.run.latest_checkpoint()
        self._last = self.read_state(latest)["step"] if latest else 0
        return latest

    def best(self) -> Path | None:
        """The checkpoint with the best `metric`, None if none was written with it."""
        found = self._best(self._scores())
        return self.run.checkpoint_path(found[1]) if found else None

    @staticmethod
    def read_state(folder: str | Path) -> dict[str, Any]:
        """Read the state that `writing` was given, with `step` and what it added.

        Raises:
            UserError: the folder is not a complete checkpoint.
        """
        path = Path(folder) / STATE_FILE
        if not path.is_file():
            raise UserError(
                f"{folder} is not a complete checkpoint: it has no {STATE_FILE}; name another one",
                code="incomplete_checkpoint",
            )
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(
                f"{path} is damaged ({error}); name another checkpoint", code="damaged_file"
            ) from error

    def _log(self, step: int, metrics: dict[str, Any]) -> dict[str, Any]:
        """Entries of a new checkpoint's state about itself and the best one."""
        log: dict[str, Any] = {"log_history": [{"step": step, **metrics}]} if metrics else {}
        scores = [score for score in self._scores() if score[1] < step]
        best = self._best([*scores, *self._score(step, metrics)])
        if best is not None:
            value, best_step = best
            log |= {
                "best_metric": value,
                "best_global_step": best_step,
                "best_model_checkpoint": self.run.checkpoint_path(best_step).name,
            }
        return log

    def _scores(self) -> list[tuple[float, int]]:
        """Value of the metric and step of every checkpoint that was written with it."""
        scores: list[tuple[float, int]] = []
        for step, folder in self.run.checkpoints() if self.metric else ():
            try:
                history = self.read_state(folder).get("log_history", [])
            except UserError:  # damaged: it cannot be the best one
                continue
            scores += self._score(step, current_names(history[-1]) if history else {})
        return scores

    def _score(self, step: int, metrics: Mapping[str, Any]) -> list[tuple[float, int]]:
        value = finite(metrics.get(self.metric or ""))
        return [] if value is None else [(float(value), step)]

    def _best(self, scores: list[tuple[float, int]]) -> tuple[float, int] | None:
        return max(scores, key=lambda score: (self._sign * score[0], -score[1]), default=None)


def save_pretrained(model: Any, tokenizer: Any, folder: str | Path) -> None:
    """Write a model, and its tokenizer unless that is None, without transformers' bar for each file.

    Other weights that lie in the folder, of a model or an adapter, are replaced.
    """
    with _no_bars():
        if isinstance(model, PreTrainedModel):
            save_weights(model, folder)
        elif hasattr(model, "peft_config"):
            with replacing_weights(folder) as place:
                model.save_pretrained(place)
        else:
            model.save_pretrained(folder)
    for path in Path(folder).rglob(ADAPTER_CONFIG):
        anchor_base(path.parent)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def load_weights(model: Any, folder: str | Path) -> None:
    """Load into a model the weights that its own `save_pretrained(folder)` wrote, bit for bit.

    Args:
        model: a transformers model, a PeftModel (its adapters are read, not the frozen weights below them) or
            one of `rlhf_models`.
        folder: the checkpoint.

    Raises:
        UserError: the weights are missing or belong to another model.
    """
    folder = Path(folder)
    try:
        if hasattr(model, "peft_config"):
            for name in model.peft_config:  # peft writes the adapter named default into the folder itself
                place = folder if name == "default" else folder / name
                model.load_adapter(str(place), adapter_name=name, is_trainable=True)
        elif hasattr(model, "load_weights"):
            model.load_weights(folder)
        else:
            with _no_bars():
                model.load_state_dict(type(model).from_pretrained(folder).state_dict())
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"{folder}: its weights do not fit this model ({error}); resume with the same model",
            code="weights_do_not_fit",
        ) from error


@contextmanager
def _no_bars() -> Iterator[None]:
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            transformers_logging.enable_progress_bar()
