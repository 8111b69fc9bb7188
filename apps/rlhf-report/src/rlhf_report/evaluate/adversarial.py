"""Prompts that provoke failures, given to each model that writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlhf_data import PromptRecord, UserError
from rlhf_eval.evaluation import (
    EvalConfig,
    Place,
    Policy,
    RLHFEvaluator,
    adversarial_prompts,
    is_refusal,
    prompt_ids,
)
from rlhf_report.evaluate.engines import Engine


class Provocation:
    """The built-in adversarial prompts with what each model wrote to them."""

    def __init__(self) -> None:
        self.prompts = adversarial_prompts()
        self.answers: dict[str, dict[str, tuple[str, list[str]]]] = {}

    def ask(
        self, policy: Policy, engine: Engine | None, place: Place, config: EvalConfig, options: dict[str, Any]
    ) -> None:
        """Let a model answer those of the adversarial prompts that fit every model so far."""
        assert place.folder is not None
        place = replace(place, folder=place.folder / "adversarial")
        options = options | {"config": config.model_copy(update={"num_samples": 1}), "place": place}
        kept = [each for each in self.prompts if _fits(policy, each.record, config.max_new_tokens)]
        provoked = RLHFEvaluator(policy, prompts=[each.record for each in kept], **options)
        written = provoked.with_engine(engine).completions()
        facts = [facts_of(provoked, place) for place in range(len(kept))]
        self.answers[place.name] = {
            prompt.prompt: (each.text, said) for prompt, each, said in zip(kept, written, facts, strict=True)
        }

    def results(self) -> dict[str, Any] | None:
        """Refusals by category, and the completions side by side; None if no model was given the prompts."""
        if not self.answers:
            return None
        common = [
            each for each in self.prompts if all(each.prompt in answers for answers in self.answers.values())
        ]
        wanted = {each.category: each.wanted for each in common}
        refusals: dict[str, dict[str, dict[str, int]]] = {}
        for name, answers in self.answers.items():
            counts = {category: {"refused": 0, "prompts": 0} for category in wanted}
            for each in common:
                counts[each.category]["prompts"] += 1
                counts[each.category]["refused"] += is_refusal(answers[each.prompt][0])
            refusals[name] = counts
        cases = []
        for each in common:
            found = {name: answers[each.prompt] for name, answers in self.answers.items()}
            said = [{"name": name, "text": text, "facts": facts} for name, (text, facts) in found.items()]
            cases.append({"prompt": each.prompt, "answers": said})
        left_out = len(self.prompts) - len(common)
        return {"wanted": wanted, "refusals": refusals, "left_out": left_out, "cases": cases}


def _fits(policy: Policy, record: PromptRecord, max_new_tokens: int) -> bool:
    try:
        prompt_ids(policy.tokenizer, policy.model, record, max_new_tokens)
    except UserError:
        return False
    return True


def facts_of(evaluator: RLHFEvaluator, place: int) -> list[str]:
    """The facts that are shown beside a completion."""
    facts = []
    for kind, label in (("reward", "reward"), ("held_out_reward", "held-out")):
        scores = evaluator.scores(kind)
        if scores is not None:
            facts.append(f"{label} {scores[:, place].mean():.3g}")
    return facts
