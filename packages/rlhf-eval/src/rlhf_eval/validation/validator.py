"""Completions with what is wrong with each of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from rlhf_data import Text, UserError, finite
from rlhf_eval.validation.consistency import Claim, Infers, claims
from rlhf_eval.validation.flaws import RULES, Flaw
from rlhf_eval.validation.language_models import ReferenceScorer

_FEWEST_CALIBRATED = 30
_OF_MODELS = ("nll", "coherence", "entailment", "contradiction")
"""Measures that need a model."""


@dataclass(frozen=True)
class ValidatorConfig:
    """Thresholds at which a measure counts as a flaw.

    Args:
        rule: for the measures of rules, in [0, 1].
        nll: mean and standard deviation of the negative log-likelihood per token of good completions under
            the reference model; None without calibration, and then likelihood is measured and flags nothing.
        surprising: a completion is flagged this many standard deviations above the mean.
        bland: likewise, below the mean.
        coherence: nats per token; less is flagged. None without calibration.
        contradiction: P(contradiction) at which a sentence is flagged, unless P(entailment) is larger.
    """

    rule: float = 0.5
    nll: tuple[float, float] | None = None
    surprising: float = 3.0
    bland: float = 2.0
    coherence: float | None = None
    contradiction: float = 0.5


@dataclass(frozen=True)
class Validation:
    """Findings in a completion.

    Args:
        score: 1 − the greatest severity, in [0, 1]; 1 for no flaw.
        measures: every measure in its own unit; None where it is not defined, or its model or source missing.
        flaws: what is beyond a threshold.
    """

    score: float
    measures: Mapping[str, float | None]
    flaws: tuple[Flaw, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return finite(
            {
                "score": self.score,
                "measures": dict(self.measures),
                "flaws": [asdict(each) for each in self.flaws],
            }
        )


class AdversarialValidator:
    """Looks for flaws without knowing the right answer; a completion without flaws may still be wrong.

    Rules measure repetition, echo of the prompt, another language, an end in the middle, and nothing at all.
    A reference model measures likelihood, too low as well as too high, and whether the order of sentences
    matters (Barzilay and Lapata 2008, section 4.1: a text against shuffles of it). A model of natural
    language inference measures how far the sentences of a text follow from its source: `entailment` is the
    mean over them, `contradiction` the worst of them (see `claims`); without one, that is not known.

    Args:
        reference: the reference model; None leaves likelihood and coherence out.
        infers: gives P(entailment) and P(contradiction) of pairs of sentences, such as an `NLIModel`; None
            leaves them out.
        config: thresholds; `calibrated` sets those of a reference model.
    """

    def __init__(
        self,
        reference: ReferenceScorer | None = None,
        infers: Infers | None = None,
        config: ValidatorConfig | None = None,
    ) -> None:
        self.reference, self.infers = reference, infers
        self.config = config or ValidatorConfig()

    def calibrated(self, prompts: Sequence[Text], completions: Sequence[str]) -> AdversarialValidator:
        """This validator with the reference model's thresholds from completions that people wrote.

        Raises:
            UserError: fewer than 30 of them have a likelihood.
        """
        if self.reference is None:
            return self
        nll = self.reference.nll(prompts, completions)
        nll = nll[np.isfinite(nll)]
        if len(nll) < _FEWEST_CALIBRATED:
            raise UserError(
                f"{len(nll)} completions are too few to set thresholds by; expected {_FEWEST_CALIBRATED}",
                code="too_few_rows",
                rows=len(nll),
            )
        coherence = self.reference.coherence(prompts, completions)
        coherence = coherence[np.isfinite(coherence)]
        least = float(np.quantile(coherence, 0.05)) if len(coherence) >= _FEWEST_CALIBRATED else None
        config = replace(self.config, nll=(float(nll.mean()), float(nll.std(ddof=1))), coherence=least)
        return AdversarialValidator(self.reference, self.infers, config)

    def validate(
        self,
        prompts: Sequence[Text],
        completions: Sequence[str],
        sources: Sequence[str | None] | None = None,
    ) -> list[Validation]:
        """Measure completions.

        Args:
            prompts: B texts or message lists.
            completions: B texts.
            sources: B texts that completions must not contradict; None for none.

        Raises:
            ValueError: arguments of different lengths.
        """
        measures = [
            {name: rule(_said(prompt), text) for name, rule in RULES.items()}
            | dict.fromkeys(_OF_MODELS, math.nan)
            for prompt, text in zip(prompts, completions, strict=True)
        ]
        if self.reference is not None:
            nll = self.reference.nll(prompts, completions).tolist()
            coherence = self.reference.coherence(prompts, completions).tolist()
            for own, *values in zip(measures, nll, coherence, strict=True):
                own["nll"], own["coherence"] = values
        made: list[list[Claim] | None] = [None] * len(completions)
        if self.infers is not None and sources is not None:
            made = claims(self.infers, sources, completions)
        for own, found in zip(measures, made, strict=True):
            if found:
                own["entailment"] = float(np.mean([claim.entailment for claim in found]))
                own["contradiction"] = max(claim.contradiction for claim in found)
        return [
            self._judged(own, text, found or ())
            for own, text, found in zip(measures, completions, made, strict=True)
        ]

    def _judged(self, measures: Mapping[str, float], text: str, made: Sequence[Claim]) -> Validation:
        flaws = [
            Flaw(name, measures[name], _excerpt(text)) for name in RULES if measures[name] >= self.config.rule
        ]
        flaws += [each for each in self._of_reference(measures) if each is not None]
        flaws += [
            Flaw("contradiction", claim.contradiction, claim.against, claim.span)
            for claim in made
            if claim.contradiction >= max(self.config.contradiction, claim.entailment)
        ]
        worst = max((each.severity for each in flaws), default=0.0)
        known = {name: None if math.isnan(value) else value for name, value in measures.items()}
        return Validation(1.0 - worst, known, tuple(flaws))

    def _of_reference(self, measures: Mapping[str, float]) -> list[Flaw | None]:
        config, found = self.config, list[Flaw | None]()
        nll, coherence = measures["nll"], measures["coherence"]
        if config.nll is not None and not math.isnan(nll):
            z = (nll - config.nll[0]) / (config.nll[1] or 1.0)
            said = f"{nll:.2f} nats per token, {z:+.1f} standard deviations from good completions"
            found.append(_beyond("surprising", z, config.surprising, said))
            found.append(_beyond("bland", -z, config.bland, said))
        if config.coherence is not None and coherence < config.coherence:
            said = f"{coherence:+.3f} nats per token likelier than with sentences in another order"
            found.append(Flaw("incoherent", 0.5, said))
        return found


def _beyond(kind: str, z: float, limit: float, said: str) -> Flaw | None:
    """A flaw of severity 0.5 at the limit, rising to 1."""
    return Flaw(kind, 1 - 0.5 * limit / z, said) if z > limit else None


def _said(prompt: Text) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(turn.get("content") or "") for turn in prompt)


def _excerpt(text: str, most: int = 80) -> str:
    return text if len(text) <= most else f"{text[:most]}…"
