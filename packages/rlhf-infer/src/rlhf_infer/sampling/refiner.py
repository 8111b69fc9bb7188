"""Draft, critique, rewrite: rounds in which a policy improves its completions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_data import Encoder, Text, UserError, as_completion
from rlhf_infer.engines.protocol import GenerationEngine, Rollout, SamplingParams
from rlhf_infer.engines.stop_strings import completion_text, goes_on_after
from rlhf_infer.rewards.combine import RewardFunctions
from rlhf_infer.sampling.candidates import SamplingCost
from rlhf_infer.sampling.refinement import Draft, Refinement, RefinerRules, RefinerTemplates

Critic = Callable[[Sequence[Text], Sequence[str]], Sequence[str]]
"""Gives a critique of each draft, given their prompts and the drafts."""


class EngineCritic:
    """A model that criticises: the policy itself, another one, or the trained monitor of a game.

    Args:
        engine: samples critiques.
        tokenizer: of its model.
        params: how critiques are sampled.
        templates: see `RefinerTemplates`.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        tokenizer: Any,
        params: SamplingParams,
        templates: RefinerTemplates | None = None,
    ) -> None:
        self.templates = templates or RefinerTemplates()
        self._writer = _Writer(engine, tokenizer, params)

    def __call__(self, prompts: Sequence[Text], drafts: Sequence[str]) -> list[str]:
        """A critique of each draft."""
        return ["" if each is None else each[0] for each in self.criticise(prompts, drafts)]

    def criticise(
        self, prompts: Sequence[Text], drafts: Sequence[str], principle: str = "", round: int = 1
    ) -> list[tuple[str, SamplingCost] | None]:
        """A critique of each draft with regard to a principle, and its cost; each round has its own seed.

        None where the draft leaves no room for it in the model's context.
        """
        asked = [
            self.templates.ask("critique", prompt, draft, principle=principle)
            for prompt, draft in zip(prompts, drafts, strict=True)
        ]
        found = self._writer.write(asked, round)
        return [None if each is None else (each[0].strip(), each[2]) for each in found]


class IterativeRefiner:
    """Lets a policy rewrite its completions after critiques (Self-Refine, arXiv:2303.17651).

    With principles it revises as Constitutional AI does (arXiv:2212.08073, section 3.1): the critiques of a
    round are about one of them, taken in turn. Without a scorer nothing says whether a rewrite is better, and
    models that judge their own answers often make them worse (arXiv:2310.01798): rules that need scores are
    then refused. The prompts of a round go to the engine together, so that drafts share prefixes. The rounds
    of a prompt end, too, where draft and critique no longer fit the model's context.

    Args:
        engine: the policy.
        tokenizer: its tokenizer.
        params: how drafts are sampled; each round has a seed of its own.
        critic: gives critiques; None lets the policy write them, sampled as drafts are.
        principles: texts; a critic that is a function does not see them.
        scorer: reward functions, of which the policy and the critic know nothing; None leaves scores out.
        rules: see `RefinerRules`.
        templates: see `RefinerTemplates`.

    Raises:
        UserError: the rules need scores, and there is no scorer.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        tokenizer: Any,
        *,
        params: SamplingParams,
        critic: EngineCritic | Critic | None = None,
        principles: Sequence[str] = (),
        scorer: RewardFunctions | None = None,
        rules: RefinerRules | None = None,
        templates: RefinerTemplates | None = None,
    ) -> None:
        self.rules, self.templates = rules or RefinerRules(), templates or RefinerTemplates()
        if scorer is None and self.rules.needs_scores:
            raise UserError(
                "nothing scores the drafts, so that none of them is the best; give a scorer, or take keep "
                "last and until no_change, verdict or never",
                code="missing_scorer",
            )
        self.critic = critic or EngineCritic(engine, tokenizer, params, self.templates)
        self.principles, self.scorer = tuple(principles), scorer
        self._writer = _Writer(engine, tokenizer, params)

    def refine(
        self, prompts: Sequence[Text], columns: Mapping[str, Sequence[Any]] | None = None
    ) -> list[Refinement]:
        """Draft, criticise and rewrite.

        Args:
            prompts: texts or message lists.
            columns: for the scorer, one value per prompt for each further column.

        Returns:
            One result per prompt, in their order.

        Raises:
            UserError: a prompt does not fit the model, or a reward fails.
        """
        cases = [
            _Case(prompt, {name: values[i] for name, values in (columns or {}).items()})
            for i, prompt in enumerate(prompts)
        ]
        self._draft(cases, 0)
        going = cases
        for round in range(1, self.rules.max_rounds + 1):
            if not going:
                break
            going = self._criticise(going, round)
            going = [case for case in going if not self.rules.finds_nothing(case.critique)]
            going = self._draft(going, round)
            going = [case for case in going if self.rules.goes_on(case.drafts)]
        return [
            Refinement(case.prompt, tuple(case.drafts), self.rules.kept(case.drafts), case.cost)
            for case in cases
        ]

    def _criticise(self, cases: Sequence[_Case], round: int) -> list[_Case]:
        """Criticise the last drafts; those that there was room for."""
        prompts, drafts = [case.prompt for case in cases], [case.drafts[-1].text for case in cases]
        principle = self.principles[(round - 1) % len(self.principles)] if self.principles else ""
        found: Sequence[tuple[str, SamplingCost] | None]
        if isinstance(self.critic, EngineCritic):
            found = self.critic.criticise(prompts, drafts, principle, round)
        else:
            found = [(text, SamplingCost()) for text in (self.critic(prompts, drafts) if cases else ())]
        criticised = []
        for case, each in zip(cases, found, strict=True):
            if each is not None:
                text, cost = each
                case.critique, case.principle, case.cost = text, principle, case.cost + cost
                criticised.append(case)
        return criticised

    def _draft(self, cases: Sequence[_Case], round: int) -> list[_Case]:
        """Write the next drafts, and score them; those that there was room for."""
        asked = [
            self.templates.ask("refine", case.prompt, case.drafts[-1].text, critique=case.critique)
            if round
            else case.prompt
            for case in cases
        ]
        written = []
        for case, each in zip(cases, self._writer.write(asked, round), strict=True):
            if each is not None:
                text, rollout, cost = each
                text = _begun_like(case.drafts[0].text, text) if round else text
                case.drafts.append(Draft(text, case.critique, case.principle, None, rollout.finish_reason))
                case.completion_ids = rollout.completion_ids
                case.cost += cost
                written.append(case)
        if self.scorer is not None and written:
            _score(self.scorer, written)
        return written


@dataclass
class _Case:
    """A prompt at work: its columns, the drafts so far, and the critique of the last one."""

    prompt: Text
    columns: dict[str, Any]
    drafts: list[Draft] = field(default_factory=list)
    critique: str = ""
    principle: str = ""
    completion_ids: list[int] = field(default_factory=list)
    cost: SamplingCost = field(default_factory=SamplingCost)


class _Writer:
    """One completion of each text or chat."""

    def __init__(self, engine: GenerationEngine, tokenizer: Any, params: SamplingParams) -> None:
        self.engine, self.tokenizer, self.params = engine, tokenizer, params
        self.encoder = Encoder(tokenizer)

    def write(self, asked: Sequence[Text], round: int) -> list[tuple[str, Rollout, SamplingCost] | None]:
        """Text, rollout and cost of each completion; None for what does not fit after the first round."""
        ids = [self.encoder.prompt(each) for each in asked]
        params = dataclasses.replace(self.params, seed=self.params.seed + round)
        return [
            None
            if each is None
            else (
                completion_text(self.tokenizer, each.completion_ids, params, goes_on_after(text, prompt)),
                each,
                SamplingCost(1, len(prompt), len(each.completion_ids)),
            )
            for text, prompt, each in zip(asked, ids, self._rollouts(ids, params, round), strict=True)
        ]

    def _rollouts(self, ids: Sequence[list[int]], params: SamplingParams, round: int) -> list[Rollout | None]:
        if not ids:
            return []
        try:
            return [group[0] for group in self.engine.generate(ids, 1, params)]
        except UserError as error:
            if not round or error.code != "context_too_short":
                raise
        if len(ids) == 1:
            return [None]
        return [rollout for each in ids for rollout in self._rollouts([each], params, round)]


def _score(scorer: RewardFunctions, cases: Sequence[_Case]) -> None:
    """Score the last draft of each."""
    names = sorted({name for case in cases for name in case.columns})
    totals = scorer(
        [case.prompt for case in cases],
        [as_completion(case.prompt, case.drafts[-1].text) for case in cases],
        completion_ids=[case.completion_ids for case in cases],
        columns={name: [case.columns.get(name) for case in cases] for name in names},
        fill_in=False,
    ).total.tolist()
    for case, total in zip(cases, totals, strict=True):
        score = None if math.isnan(total) else total
        case.drafts[-1] = dataclasses.replace(case.drafts[-1], score=score)


def _begun_like(first: str, text: str) -> str:
    """A rewrite, with the white space in front that a completion of the prompt itself has."""
    return first[: len(first) - len(first.lstrip())] + text.strip()
