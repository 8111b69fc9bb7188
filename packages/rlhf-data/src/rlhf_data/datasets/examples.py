"""What the trainers of preferences, labels and steps learn from: tokenised examples as plain tuples.

Supervised examples need no type of their own: a `TokenSequence` whose scored tokens are the learned ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rlhf_data.datasets.packing import TokenSequence
    from rlhf_data.records.transcripts import Text


class PreferencePair(NamedTuple):
    """Two completions of one prompt, the first preferred to the second.

    Attributes:
        chosen: prompt and preferred completion; the completion's tokens are scored.
        rejected: prompt and other completion; the completion's tokens are scored.
        margin: by how much the chosen one is better, in units of reward; 0 where nobody said.
        ref_chosen_logps: log π_ref(chosen | prompt), where known.
        ref_rejected_logps: log π_ref(rejected | prompt), where known.
    """

    chosen: TokenSequence
    rejected: TokenSequence
    margin: float = 0.0
    ref_chosen_logps: float | None = None
    ref_rejected_logps: float | None = None


class KTOExample(NamedTuple):
    """One completion that is labelled good or bad.

    Attributes:
        sequence: prompt and completion; the completion's tokens are scored.
        label: True for a desirable completion.
        kl_sequence: the same prompt with another row's completion, from which the KL is estimated; None
            where the estimate needs no such pair.
        ref_logps: log π_ref(completion | prompt), where known.
        ref_kl_logps: the same for the completion of `kl_sequence`.
    """

    sequence: TokenSequence
    label: bool
    kl_sequence: TokenSequence | None = None
    ref_logps: float | None = None
    ref_kl_logps: float | None = None


class StepExample(NamedTuple):
    """One solution whose steps are labelled.

    Attributes:
        sequence: prompt and steps, each step ended by the separator; nothing of it need be scored.
        step_ends: index in `sequence.input_ids` of every step's last token, ascending; at least one.
        labels: one per step, in [0, 1]: 1 for a right step. Empty where only whole solutions are compared.
    """

    sequence: TokenSequence
    step_ends: tuple[int, ...]
    labels: tuple[float, ...]


class StepPair(NamedTuple):
    """Two solutions of one prompt, the first with the better outcome.

    Attributes:
        chosen: the better solution.
        rejected: the worse solution.
    """

    chosen: StepExample
    rejected: StepExample


class PromptExample(NamedTuple):
    """A prompt to complete.

    Attributes:
        prompt: its text or messages.
        prompt_ids: its token ids, up to where the completion starts.
        columns: the row's other columns.
    """

    prompt: Text
    prompt_ids: tuple[int, ...]
    columns: dict[str, Any]
