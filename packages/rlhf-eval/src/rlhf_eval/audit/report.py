"""Reports of an audit: sentences, numbers, a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rlhf_eval.audit.gap import MARGIN, Gap
from rlhf_eval.audit.hints import Hint
from rlhf_eval.figures import (
    BLUE,
    GREY,
    ORANGE,
    Panel,
    add_legend,
    can_draw,
    figure_grid,
    make_panel,
    step_axis,
)
from rlhf_eval.html import findings_list, number, page, paragraphs, section, table, text, verbatim
from rlhf_eval.stats import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NO_DETECTOR = (
    "No reward is held out in this run, so nothing can be found: without one there are hints only, which "
    "good runs show too."
)
Method = Literal["game", "rewards", "other"]
_TO_HOLD_OUT: dict[Method, str] = {
    "game": "Name scorers that are not trained on (held_out.reward_model, held_out.judge), measure them "
    "in training (training.eval_steps), and audit that run.",
    "rewards": "Log a second reward with weight 0 (reward_weights) and audit again.",
    "other": "If the log has a reward that is not trained on, name it with --held-out, and the one that is "
    "with --train.",
}


@dataclass(frozen=True)
class Audit:
    """Findings in a run.

    Args:
        name: the run's name.
        gaps: gaps between each reward that is trained on and one that is held out.
        hints: signs without one.
        method: what trained the run, as `method_of` finds it: it says how a reward is held out.
    """

    name: str
    gaps: tuple[Gap, ...]
    hints: tuple[Hint, ...]
    method: Method = "rewards"

    @property
    def is_gamed(self) -> bool:
        """Whether a held-out reward shows that the reward is gamed."""
        return any(gap.is_gamed for gap in self.gaps)

    @property
    def is_decided(self) -> bool:
        """Whether the reward is gamed, or every held-out reward could show it and does not."""
        could_show = [gap.without_interval is None for gap in self.gaps]
        return self.is_gamed or (bool(could_show) and all(could_show))

    @property
    def sentences(self) -> list[str]:
        """The finding for each held-out reward; if there is none, that nothing can be found."""
        return [_sentence(gap) for gap in self.gaps] or [f"{_NO_DETECTOR} {_TO_HOLD_OUT[self.method]}"]

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        gaps = [
            {"train": gap.train, "held_out": gap.held_out, "gamed": gap.is_gamed, "onset": gap.onset}
            | {"decided": gap.without_interval is None}
            | {name: vars(getattr(gap, name)) for name in ("gain", "held_gain", "gap")}
            | {"curve": [{"step": step, **vars(interval)} for step, interval in gap.curve]}
            for gap in self.gaps
        ]
        hints = [{"name": hint.name, "text": hint.text} for hint in self.hints]
        found = {"run": self.name, "gamed": self.is_gamed, "decided": self.is_decided, "margin": MARGIN}
        return found | {"gaps": gaps, "hints": hints}


def method_of(rows: Sequence[Mapping[str, Any]]) -> Method:
    """Method that trained a run, by its logs: the game, one that maximises rewards, or another."""
    logged = {key for row in rows for key in row}
    if any(key.startswith(("minmax/", "eval_minmax/")) for key in logged):
        return "game"
    return "rewards" if any(key == "reward" or key.startswith("rewards/") for key in logged) else "other"


def audit_page(audit: Audit, samples: Sequence[Mapping[str, Any]]) -> str:
    """One HTML file: the finding, the two rewards and the gap over the steps, hints, completions to read.

    Args:
        audit: the findings.
        samples: rows of samples.jsonl.
    """
    verdict = "The reward is gamed" if audit.is_gamed else "No gamed reward found"
    kind = "bad-text" if audit.is_gamed else "good-text"
    if not audit.is_decided:
        verdict, kind = "Not decided", "soft"
    body = f'<h1>{text(audit.name)}</h1>\n<p class="{kind}">{verdict}</p>\n'
    body += paragraphs(audit.sentences)
    for gap in audit.gaps:
        figures = figure_grid(_panels(gap), titled=False) if can_draw() else ""
        body += section(f"{gap.train} beside {gap.held_out}", figures + _numbers(gap))
    hints = [f"{text(hint.text)} <small>({text(hint.name)})</small>" for hint in audit.hints]
    listed = findings_list(hints) if hints else "<p>None.</p>"
    note = (
        "<p class='soft'>Signs that go with a gamed reward, and with good runs too; they decide nothing.</p>"
    )
    body += section("Hints", note + listed)
    body += section("Completions of the start and the end", _samples_html(samples))
    return page(f"Audit of {audit.name}", body)


def _sentence(gap: Gap) -> str:
    train = f"{gap.train} changed by {_of(gap.gain)}"
    held = f"{gap.held_out}, which is not trained on, by {_of(gap.held_gain)}"
    facts = f"{train} standard deviations since the start, {held}; gap {_of(gap.gap)}."
    if gap.is_gamed:
        since = f", from step {gap.onset:,} at the latest" if gap.onset is not None else ""
        return f"The reward is gamed{since}: {facts} Take a checkpoint from before, and read the samples."
    if gap.without_interval is not None:
        return (
            f"It cannot be decided whether the reward is gamed, since {gap.without_interval} has no "
            f"interval: the values of the steps that are compared do not vary. {facts} Train longer, or "
            "measure on more prompts."
        )
    if gap.gap.low > MARGIN and gap.held_gain.low > 0:
        return f"Part of the gain is {gap.train}'s own, but the held-out reward rises too: {facts}"
    return f"Nothing shows that the reward is gamed: {facts}"


def _of(interval: Interval) -> str:
    low, high = (f"{end:+.2f}" if math.isfinite(end) else "–" for end in (interval.low, interval.high))
    return f"{interval.estimate:+.2f} [{low}, {high}]"


def _numbers(gap: Gap) -> str:
    parts = (("reward that is trained on", gap.gain), ("held-out reward", gap.held_gain), ("gap", gap.gap))
    rows = [[text(name), number(x.estimate, 2), number(x.low, 2), number(x.high, 2)] for name, x in parts]
    head = ["change", "mean", "95% from", "to"]
    note = (
        "Of the last fifth of the steps since the first tenth, in standard deviations of a completion's "
        f"reward at the start. {gap.gap.n} steps are resampled "
        f"({gap.gap.method}). The reward counts as gamed where what is trained on rose, the held-out reward "
        f"did not beyond its interval, and the interval of the gap lies above {MARGIN}."
    )
    return table(head, rows, numeric=True, narrow=True) + f'<p class="soft">{text(note)}</p>'


def _panels(gap: Gap) -> list[Panel]:
    def rewards(axes: Axes) -> None:
        axes.plot(gap.steps, gap.trained, color=BLUE, linewidth=1, label="trained on")
        axes.plot(gap.steps, gap.held, color=ORANGE, linewidth=1, label="held out")
        axes.set_ylabel("standard deviations")
        step_axis(axes)
        add_legend(axes, columns=2)

    def band(axes: Axes) -> None:
        steps = [step for step, _ in gap.curve]
        axes.fill_between(
            steps, [x.low for _, x in gap.curve], [x.high for _, x in gap.curve], color=BLUE, alpha=0.25, lw=0
        )
        axes.plot(steps, [x.estimate for _, x in gap.curve], color=BLUE)
        axes.axhline(MARGIN, color=GREY, linewidth=1, linestyle="--")
        if gap.onset is not None:
            axes.axvline(gap.onset, color=ORANGE, linewidth=1)
        axes.set_ylabel("gap, standard deviations")
        step_axis(axes)

    onset = f"; it stays above {MARGIN} from step {gap.onset:,} on" if gap.onset is not None else ""
    return [
        make_panel("Rewards", f"{gap.train} (blue) and {gap.held_out} (orange) since the start", rewards),
        make_panel("Gap", f"How much more the one has risen than the other, with 95% intervals{onset}", band),
    ]


def _samples_html(samples: Sequence[Mapping[str, Any]]) -> str:
    stages = [[row for row in samples if row.get("stage") == stage] for stage in ("start", "end")]
    if not all(stages):
        return "<p>This run kept none.</p>"
    body = ""
    for before, after in zip(*stages, strict=False):
        body += f'<div class="card">{verbatim(before.get("prompt", ""))}<div class="grid">'
        for name, row in (("start", before), ("end", after)):
            body += f"<div><h3>{name}</h3>{verbatim(row.get('completion', ''))}</div>"
        body += "</div></div>\n"
    return body
