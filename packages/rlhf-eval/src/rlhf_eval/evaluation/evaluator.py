"""One policy on prompts: its completions, their rewards, the KL to its reference, diversity, win rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from rlhf_data import PreferenceRecord, PromptRecord, Text, UserError, as_messages
from rlhf_eval.evaluation.ledger import Ledger
from rlhf_eval.evaluation.pair_judges import PairJudge, Verdicts
from rlhf_eval.evaluation.policies import Policy
from rlhf_eval.evaluation.written import EvalConfig, Place, Written, as_read, prompt_ids, row_of, written_of
from rlhf_eval.scoring import Scorer

if TYPE_CHECKING:
    from rlhf_data import TokenSequence


class RLHFEvaluator:
    """Evaluates one policy; what was computed is kept, so that every number is computed once.

    Args:
        policy: its model and tokenizer; None if the completions are given by `with_completions`.
        reference: another policy, or its evaluator on the same prompts; None for none.
        reward_model: what completions are scored by; None for no scores.
        prompts: texts, messages or records with further columns.
        judge: compares completions with another's; None for none.
        config: see `EvalConfig`.
        held_out_reward: a reward that nothing was trained on.
        place: the policy's name, and where its numbers are kept.
    """

    def __init__(
        self,
        policy: Policy | None,
        reference: Policy | Self | None = None,
        reward_model: Scorer | None = None,
        prompts: Sequence[Text | PromptRecord] = (),
        judge: PairJudge | None = None,
        config: EvalConfig | None = None,
        *,
        held_out_reward: Scorer | None = None,
        place: Place | None = None,
    ) -> None:
        place = place or Place()
        self.policy: Any = policy
        self.name, self.judge = place.name, judge
        self.rewards = {"reward": reward_model, "held_out_reward": held_out_reward}
        self.prompts = [each if isinstance(each, PromptRecord) else PromptRecord(each) for each in prompts]
        self.config, self.folder, self.progress = config or EvalConfig(), place.folder, place.progress
        self._ledgers: dict[str, Ledger] = {}
        self._engine: Callable[[], AbstractContextManager[Any]] | None = None
        if reference is None or isinstance(reference, RLHFEvaluator):
            self.reference = reference
        else:
            self.reference = RLHFEvaluator(
                reference,
                reward_model=reward_model,
                prompts=self.prompts,
                config=self.config,
                held_out_reward=held_out_reward,
                place=Place(f"reference of {place.name}", progress=place.progress),
            )

    @property
    def keys(self) -> list[str]:
        """`prompt/sample` of every completion, by prompt."""
        samples = range(self.config.num_samples)
        return [f"{i}/{j}" for i in range(len(self.prompts)) for j in samples]

    @property
    def clusters(self) -> list[int]:
        """The prompt of each completion."""
        return [i for i in range(len(self.prompts)) for _ in range(self.config.num_samples)]

    def with_completions(self, completions: Sequence[Sequence[Written]]) -> Self:
        """Take completions that were written elsewhere, `num_samples` of each prompt; returns itself."""
        flat = [written for group in completions for written in group]
        rows = {key: row_of(written) for key, written in zip(self.keys, flat, strict=True)}
        ledger = self._ledger("completions")
        ledger.add({key: rows[key] for key in ledger.missing(rows)})
        return self

    def with_engine(self, engine: Callable[[], AbstractContextManager[Any]] | None) -> Self:
        """Let another engine than transformers draw the completions; returns itself.

        What is measured of them, the KL among it, stays the policy's own.

        Args:
            engine: makes a `rlhf_infer.GenerationEngine` of the policy's model; called where completions are
                missing. None for transformers.
        """
        self._engine = engine
        return self

    def completions(self) -> list[Written]:
        """The policy's completions, `num_samples` for each prompt, those of a prompt adjacent.

        Raises:
            UserError: there is no policy to write them, or a prompt does not fit its context.
        """
        ledger = self._ledger("completions")
        if left := ledger.missing(self.keys):
            self._generate(ledger, sorted({int(key.partition("/")[0]) for key in left}))
        return [written_of(ledger.rows[key]) for key in self.keys]

    def scores(self, kind: str = "reward") -> np.ndarray | None:
        """(K, n) scores of all completions by the K members of a reward, else K = 1; None without it.

        Args:
            kind: `reward` or `held_out_reward`.

        Raises:
            UserError: a completion cannot be scored.
        """
        scorer = self.rewards[kind]
        if scorer is None:
            return None
        ledger = self._ledger(f"{kind}s")
        left = ledger.missing(self.keys)
        if left:
            found = self._score(scorer, left)
            ledger.add({key: {"scores": found[:, i].tolist()} for i, key in enumerate(left)})
        return np.array([ledger.rows[key]["scores"] for key in self.keys], dtype=float).T

    def kl(self) -> dict[str, np.ndarray] | None:
        """Divergences from the reference, see `Divergence`, each of every completion (n,); None without one.

        Completions without a token have zeros.

        Raises:
            UserError: the tokenizers differ.
        """
        if self.reference is None:
            return None
        ledger = self._ledger("divergences")
        if left := ledger.missing(self.keys):
            self._diverge(ledger, left)
        rows = [ledger.rows[key] for key in self.keys]
        return {name: np.array([row[name] for row in rows], dtype=float) for name in rows[0]} if rows else {}

    def diversity(self) -> dict[str, float]:
        """Diversity and repetition of all completions; see `rlhf_eval.evaluation.texts`."""
        from rlhf_eval.evaluation.texts import compression_ratio, distinct_share, repeated_share

        texts = [written.text for written in self.completions()]
        groups = [
            texts[i : i + self.config.num_samples] for i in range(0, len(texts), self.config.num_samples)
        ]
        found = {f"distinct_{n}": distinct_share(texts, n) for n in (1, 2, 3)}
        found["unique"] = len(set(texts)) / len(texts)
        if self.config.num_samples > 1:
            found["unique_of_a_prompt"] = float(np.mean([len(set(group)) / len(group) for group in groups]))
        found["repeated_4grams"] = float(np.mean([repeated_share(text) for text in texts]))
        return found | {"compression_ratio": compression_ratio(texts)}

    def win_rate(
        self,
        other: RLHFEvaluator | None = None,
        *,
        judge: PairJudge | None = None,
        first: int | None = None,
    ) -> Verdicts | None:
        """A judge's verdicts on the first completion of each prompt against another's, in both orders.

        Args:
            other: the one to win against; None for the reference.
            judge: None for the evaluator's own.
            first: how many prompts are judged; None for all.

        Returns:
            See `rlhf_eval.stats.win_rate`; None without a judge or another.

        Raises:
            UserError: the judge cannot be reached.
        """
        other, judge = other or self.reference, judge or self.judge
        if judge is None or other is None:
            return None
        count = min(first or len(self.prompts), len(self.prompts))
        ledger = self._ledger(f"verdicts-{_file_name(judge.line)}-{_file_name(other.name)}")
        ours, theirs = (each.completions()[:: self.config.num_samples] for each in (self, other))
        keys = [str(i) for i in range(count)]
        with self.progress(len(left := ledger.missing(keys)), f"{self.name}: {judge.name}") as done:
            for start in range(0, len(left), 32):
                part = [int(key) for key in left[start : start + 32]]
                prompts = [self.prompts[i].prompt for i in part]
                texts = ([each[i].text for i in part] for each in (ours, theirs))
                found = judge.compare(prompts, *texts)
                ledger.add(
                    {
                        str(i): {"ahead": float(ahead), "behind": float(behind)}
                        for i, ahead, behind in zip(part, *found, strict=True)
                    }
                )
                done(len(part))
        rows = [ledger.rows[key] for key in keys]
        ahead, behind = (
            np.array([math.nan if row[side] is None else row[side] for row in rows])
            for side in ("ahead", "behind")
        )
        return Verdicts(ahead, behind)

    def reward_accuracy(self, pairs: Sequence[PreferenceRecord]) -> dict[str, np.ndarray]:
        """Agreement of rewards with human preferences: (n,) 1, 0, or ½ for a tie, by reward.

        Args:
            pairs: held-out preferences.

        Raises:
            UserError: a pair cannot be scored.
        """
        found = {}
        for kind, scorer in self.rewards.items():
            if scorer is not None:
                both = [
                    as_read(scorer.reads_chat, pair.prompt, text)
                    for pair in pairs
                    for text in (pair.chosen, pair.rejected)
                ]
                scores = scorer([prompt for prompt, _ in both], [text for _, text in both]).mean(0)
                found[kind] = (1 + np.sign(scores[0::2] - scores[1::2])) / 2
        return found

    def implicit_accuracy(self, pairs: Sequence[PreferenceRecord]) -> np.ndarray | None:
        """The same by log π(y | x) − log π_ref(y | x), its implicit reward; None without a reference.

        It is DPO's reward up to β and what depends on the prompt alone (Rafailov et al. 2023,
        https://arxiv.org/abs/2305.18290, equation 5).

        Args:
            pairs: held-out preferences.

        Raises:
            UserError: the tokenizers differ, or a pair cannot be encoded.
        """
        reference = None if self.reference is None else self.reference.policy
        if self.policy is None or reference is None:
            return None
        return (1 + np.sign(self._implicit_margins(reference, pairs))) / 2

    def evaluate(self) -> dict[str, Any]:
        """Every number about this policy and, if there is a reference, about both; JSON values."""
        from rlhf_eval.evaluation.measures import measure_against, measure_policy

        found = measure_policy(self)
        if self.reference is not None:
            found["against"] = measure_against(self, self.reference, [self.judge] if self.judge else [])
        return found

    def release(self) -> None:
        """Let go of the policy's model; what was computed stays."""
        self.policy = None

    def _ledger(self, name: str) -> Ledger:
        if name not in self._ledgers:
            path = None if self.folder is None else self.folder / f"{name}.jsonl"
            self._ledgers[name] = Ledger(path)
        return self._ledgers[name]

    def _generate(self, ledger: Ledger, prompts: Sequence[int]) -> None:
        from rlhf_infer import SamplingParams, TransformersEngine

        if self.policy is None:
            raise UserError(
                f"{self.name} has no completion of prompt {prompts[0] + 1}, and no model to write it",
                code="missing_completion",
            )
        config, tokenizer = self.config, self.policy.tokenizer
        make = self._engine or (lambda: nullcontext(TransformersEngine(self.policy.model, tokenizer)))
        params = SamplingParams(config.max_new_tokens, temperature=config.temperature, seed=config.seed)
        ids = {i: self._prompt_ids(i) for i in prompts}
        with make() as engine, self.progress(len(prompts), f"{self.name} writes") as done:
            for start in range(0, len(prompts), config.gen_batch_size):
                part = prompts[start : start + config.gen_batch_size]
                rollouts = engine.generate([ids[i] for i in part], config.num_samples, params)
                rows = {}
                for i, group in zip(part, rollouts, strict=True):
                    for j, rollout in enumerate(group):
                        written = rollout.completion_ids
                        text = _continuation(tokenizer, ids[i], written)
                        rows[f"{i}/{j}"] = row_of(Written(text, written, rollout.finish_reason == "length"))
                ledger.add(rows)
                done(len(part))

    def _prompt_ids(self, index: int) -> list[int]:
        record = self.prompts[index]
        if not record.where:
            record = replace(record, where=f"prompt {index + 1}")
        return prompt_ids(self.policy.tokenizer, self.policy.model, record, self.config.max_new_tokens)

    def _score(self, scorer: Scorer, keys: Sequence[str]) -> np.ndarray:
        rows = self.completions()
        places = {key: place for place, key in enumerate(self.keys)}
        written = [rows[places[key]] for key in keys]
        records = [self.prompts[int(key.partition("/")[0])] for key in keys]
        read = [
            as_read(scorer.reads_chat, record.prompt, each.text)
            for record, each in zip(records, written, strict=True)
        ]
        ids = [each.ids for each in written]
        names = sorted({name for record in records for name in record.columns})
        with self.progress(len(keys), f"{self.name}: {scorer.name}") as done:
            return scorer(
                [prompt for prompt, _ in read],
                [text for _, text in read],
                completion_ids=None if None in ids else [each or [] for each in ids],
                columns={name: [record.columns.get(name) for record in records] for name in names},
                done=done,
            )

    def _diverge(self, ledger: Ledger, keys: Sequence[str]) -> None:
        from rlhf_data import TokenSequence
        from rlhf_eval.evaluation.divergence import Divergence, check_same_tokens, divergences
        from rlhf_models import evaluating

        assert self.reference is not None
        policy, reference = self.policy, self.reference.policy
        rows = dict(zip(self.keys, self.completions(), strict=True))
        if policy is None or reference is None or any(rows[key].ids is None for key in keys):
            raise UserError(f"{self.name}: a KL needs both models, and completions that this evaluation drew")
        check_same_tokens(policy.tokenizer, reference.tokenizer, (self.name, self.reference.name))
        sequences, known = [], []
        for key in keys:
            if completion := rows[key].ids:
                prompt = self._prompt_ids(int(key.partition("/")[0]))
                sequences.append(TokenSequence([*prompt, *completion], len(prompt)))
                known.append(key)
        ledger.add({key: Divergence(0, 0.0, 0.0, 0.0, 0.0)._asdict() for key in set(keys) - set(known)})
        with (
            self.progress(len(sequences), f"{self.name}: KL to {self.reference.name}") as done,
            evaluating(policy.model),
            evaluating(reference.model),
        ):
            found = divergences(
                policy.model,
                reference.model,
                sequences,
                max_tokens=self.config.max_tokens_per_batch,
                done=done,
            )
            for number, divergence in found:
                ledger.add({known[number]: divergence._asdict()})

    def _implicit_margins(self, reference: Any, pairs: Sequence[PreferenceRecord]) -> np.ndarray:
        from rlhf_data import Encoder, TokenSequence
        from rlhf_eval.evaluation.divergence import check_same_tokens, sequence_logps
        from rlhf_models import evaluating

        tokenizer = self.policy.tokenizer
        check_same_tokens(tokenizer, reference.tokenizer, (self.name, "its reference"))
        encoder = Encoder(tokenizer)
        sequences: list[TokenSequence] = []
        for pair in pairs:
            read: Any = as_messages(pair) if tokenizer.chat_template else pair
            both, start = encoder.completions(read.prompt, [read.chosen, read.rejected], read.template)
            sequences += [TokenSequence(ids, start) for ids in both]
        ratios = []
        for model in (self.policy.model, reference.model):
            with evaluating(model):
                logps = sequence_logps(model, sequences, max_tokens=self.config.max_tokens_per_batch)
                ratios.append(logps.numpy())
        advantage = ratios[0] - ratios[1]
        return advantage[0::2] - advantage[1::2]


def _continuation(tokenizer: Any, prompt: list[int], completion: list[int]) -> str:
    """The text of a completion as it continues its prompt, with the space that it may begin with.

    Decoded alone it may lose that space, or get one, as many tokenizers treat the start of a text apart.
    """
    before, whole = (
        tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, [*prompt, *completion])
    )
    if whole.startswith(before):
        return whole[len(before) :]
    return tokenizer.decode(completion, skip_special_tokens=True)


def _file_name(text: str) -> str:
    import hashlib

    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=6).hexdigest()
