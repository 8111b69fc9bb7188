"""Events of a run, for its observer."""

from __future__ import annotations

from rlhf_algos import StepReport
from rlhf_minmax.evaluation.break_even import BreakEven
from rlhf_minmax.evaluation.evaluate import Metrics
from rlhf_models import DeviceManager


class Events:
    """Observer of a run; methods do nothing unless overridden."""

    def device_plan(self, rows: list[dict[str, str]]) -> None:
        """Role, device, dtype and reason of every model."""

    def warning(self, text: str) -> None:
        """A warning: a suspicious setting, or a recovered failure."""

    def building(self, seconds: float) -> None:
        """Models are built next, in about `seconds` on this machine."""

    def demo_step(self, stage: str, step: int, total: int, metrics: dict[str, float]) -> None:
        """A training step of a demonstration model."""

    def break_even(self, check: BreakEven) -> None:
        """The pre-flight check."""

    def phase(self, name: str, start: int, total: int) -> None:
        """`plain` or `minmax` begins, at a step (above 0 when resumed)."""

    def step(self, phase: str, step: int, total: int, metrics: Metrics) -> None:
        """A step of `plain` or `minmax`."""

    def report(self, phase: str, report: StepReport) -> None:
        """The same step, with its pace and the checkpoint that was written after it."""

    def remark(self, text: str) -> None:
        """A remark on the run: what is measured now, an early stop, the best checkpoint restored."""

    def evaluated(self, block: str, metrics: Metrics) -> None:
        """A held-out evaluation: `before`, `plain` or `after`."""


def device_rows(devices: DeviceManager) -> list[dict[str, str]]:
    """The device plan as rows."""
    return [dict(zip(("role", "device", "dtype", "reason"), row, strict=True)) for row in devices.table()]


def duration(seconds: float) -> str:
    """An approximate duration as text."""
    minutes = round(seconds / 60)
    return f"about {minutes} min" if minutes >= 2 else f"about {max(1, round(seconds))} s"
