"""The pre-flight of an online training: sample the first prompts, and check the completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlhf_algos.engine.step_examples import order_of, steps_of
from rlhf_algos.online.preflight import Finding, ReferenceRewards, preflight, repeated_prompts
from rlhf_algos.online.rollouts import column_names, completions_of, samples_of
from rlhf_data import PromptExample, as_completion
from rlhf_infer import Samples
from rlhf_models import generation_length

if TYPE_CHECKING:
    from rlhf_algos.online.base import OnlineTrainer

_PROMPTS = 32
"""Maximum number of prompts that are checked."""
_REFERENCES = ("completion", "chosen")
_VERIFIABLE = ("number", "math", "choice", "exact")
"""Rules whose `answer` column is a completion that they reward."""


def check_first_rollout(trainer: OnlineTrainer) -> list[Finding]:
    """Findings of `rlhf_algos.online.preflight` on completions of the first prompts; nothing is trained.

    Every process must call it; each checks its share of the prompts.
    """
    config, parallel = trainer.config, trainer.parallel
    trainer.prepare()
    trainer.scorer.eval()
    order = order_of(trainer.examples, 0, shuffle=config.shuffle, seed=config.seed)
    count = min(trainer.global_batch_size, _PROMPTS)
    prompts = next(steps_of(trainer.examples, order, range(0, count, count), parallel))
    rollouts = trainer.sample(prompts, config.num_generations, seed=trainer.seed_of(0))
    own = prompts[parallel.rank :: parallel.world_size]
    groups, references = _references(trainer, own)
    scored = [samples_of(completions_of(own, rollouts, trainer.tokenizer), 0), *references] if own else []
    remembered = trainer.rewards.state()
    measured = trainer.rewards.measure(scored)  # once in every process: they may share reward workers
    trainer.rewards.load_state(remembered)
    if not own:
        return []
    scores, *known = (
        trainer.rewards.joined([part], samples) for part, samples in zip(measured, scored, strict=True)
    )
    references = ReferenceRewards(groups, *(each.total for each in known)) if known else None
    found = preflight(
        rollouts,
        scores,
        eos_token_ids=trainer.engine.eos_token_ids,
        max_completion_length=config.max_completion_length,
        references=references,
        relative_to_group=trainer.compares_groups,
        mask_truncated=config.mask_truncated_completions,
    )
    return [*found, *repeated_prompts(rollouts, config.max_tokens_per_batch)]


def _references(trainer: OnlineTrainer, prompts: Sequence[PromptExample]) -> tuple[list[int], list[Samples]]:
    """The rows' own answers, each after its prompt and after another row's; and which rows have one."""
    names = [*_REFERENCES, *(["answer"] if set(trainer.rewards.names) <= set(_VERIFIABLE) else [])]
    found = [
        (at, next((p.columns[name] for name in names if isinstance(p.columns.get(name), str)), None))
        for at, p in enumerate(prompts)
    ]
    known = {at: trainer.tokenizer.encode(text, add_special_tokens=False) for at, text in found if text}
    groups = _fitting(trainer, prompts, known)
    if len(groups) < 2:
        return [], []
    own = [prompts[at] for at in groups]
    texts = [as_completion(prompts[at].prompt, str(found[at][1])) for at in groups]
    ids = [known[at] for at in groups]
    columns = {name: [each.columns.get(name) for each in own] for name in column_names(own)}
    asked = [each.prompt for each in own]
    turned = [texts[-1], *texts[:-1]], [ids[-1], *ids[:-1]]
    return groups, [Samples(asked, *answers, columns, 0) for answers in ((texts, ids), turned)]


def _fitting(
    trainer: OnlineTrainer, prompts: Sequence[PromptExample], ids: Mapping[int, Sequence[int]]
) -> list[int]:
    """Prompts that leave room in the model's context for the longest of their answers."""
    limit = generation_length(trainer.model.config)
    if limit is None:
        return list(ids)
    alone = [at for at, answer in ids.items() if len(prompts[at].prompt_ids) + len(answer) <= limit]
    longest = max((len(ids[at]) for at in alone), default=0)
    return [at for at in alone if len(prompts[at].prompt_ids) + longest <= limit]
