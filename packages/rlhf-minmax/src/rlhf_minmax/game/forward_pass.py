"""One pass of the game: stories in, answers, critiques, scores and violations out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rlhf_algos import in_batches
from rlhf_algos.process_group import all_gather, shard
from rlhf_data import QARecord
from rlhf_infer import Judge, Rollout, SamplingParams, TransformersEngine
from rlhf_minmax.config.run import MinMaxConfig, PlayerConfig
from rlhf_minmax.formats import Critique, parse_critique
from rlhf_minmax.game import seeds
from rlhf_minmax.game.prompts import Prompts, prompt_ids, verdict_probability
from rlhf_minmax.game.scores import Scale, Scorer
from rlhf_minmax.game.stopwatch import Stopwatch
from rlhf_minmax.game.validator import Validator
from rlhf_minmax.players.players import Players
from rlhf_minmax.players.sharded import ShardedGame
from rlhf_minmax.players.workers import GameWorkers
from rlhf_minmax.truthfulness import mean_violation, violations, weighted_violations
from rlhf_models import PolicyModel


@dataclass(frozen=True)
class Answer:
    """An answer to one story of a batch.

    Args:
        story: index of the story in the batch.
        text: the completion's text.
        claim: the choice it commits to; None when it names none.
        correct: whether that is the right one; None if the story's right answer is not known.
        hack: whether it takes the planted bait; None if there is none, or the right answer is not known.
        rollout: how it was sampled; None for a made-up answer.
    """

    story: int
    text: str
    claim: str | None
    correct: bool | None
    hack: bool | None
    rollout: Rollout | None = None


@dataclass(frozen=True)
class CritiqueSample:
    """A critique of one of a list of answers.

    Args:
        answer: index of the answer.
        text: the completion's text.
        parsed: what the strict parser read; None when it broke the form.
        evidence_valid: whether the evidence holds: quoted from the story, or right by the data set's rules.
        grounded: evidence valid, and not at odds with the verdict where the data set has a rule.
        confidence: probability the monitor gave to its verdict: stated, else that of the verdict's tokens.
        rollout: how it was sampled.
    """

    answer: int
    text: str
    parsed: Critique | None
    evidence_valid: bool
    grounded: bool
    confidence: float
    rollout: Rollout

    @property
    def said_right(self) -> bool:
        """Whether the verdict is "right"; an unparsable critique says nothing, which counts as "wrong"."""
        return self.parsed is not None and self.parsed.verdict == "right"


@dataclass(frozen=True)
class MinMaxOutput:
    """The result of one forward pass of the game.

    Args:
        records: the S stories, then those whose answers were criticised, where they are others.
        answers: S·N sampled answers, those of a story adjacent.
        rewards: (S·N,) standardised reward-model scores.
        judged: the J answers that were criticised: one sampled answer per story, then made-up ones.
        judged_rewards: (J,) their standardised reward-model scores.
        critiques: J·K critiques, those of an answer adjacent.
        judge_scores: (J·K,) standardised judge scores.
        combined: (J·K,) w_reward · R(answer) + w_judge · J(answer, critique).
        labels: (J·K,) bool, whether the criticised answer is right; False where that is not known.
        known: (J·K,) bool, whether that is known: whether the story has a label.
        violation: (J·K,) violation of each critique in [0, 1].
        weighted_violation: (J·K,) the same as the constraint counts it.
    """

    records: Sequence[QARecord]
    answers: list[Answer]
    rewards: Tensor
    judged: list[Answer]
    judged_rewards: Tensor
    critiques: list[CritiqueSample]
    judge_scores: Tensor
    combined: Tensor
    labels: Tensor
    known: Tensor
    violation: Tensor
    weighted_violation: Tensor

    @property
    def mean_violation(self) -> float | None:
        """The batch's violation, over critiques of answers with a label; None if there is none."""
        return mean_violation(self.weighted_violation, self.known)

    def labelled(self) -> tuple[list[CritiqueSample], Tensor]:
        """The critiques of answers with a label, and (C,) bool their labels."""
        known = zip(self.critiques, self.known.tolist(), strict=True)
        return [critique for critique, has_label in known if has_label], self.labels[self.known]


@dataclass
class MinMaxPipeline:
    """The players, the reward model and the judge, put together.

    Several processes write a part of the answers and critiques each, and all of them get the whole.

    Args:
        players: policy and monitor.
        reward_model: scores answers.
        judge: scores answers with critiques.
        prompts: templates and the data set's rules.
        config: the run's settings.
        w_judge: weight of the judge's standardised score.
        reward_scale: standardises the reward model's scores.
        judge_scale: standardises the judge's scores.
        watch: times answers, critiques and scores.
        passes: how many forward passes have drawn their own seed.
        shared: the models, where processes hold a part of them each; None where they are whole.
        workers: processes that sample; None for this one.
    """

    players: Players
    reward_model: Scorer
    judge: Judge | Validator
    prompts: Prompts
    config: MinMaxConfig
    w_judge: float = 1.0
    reward_scale: Scale = field(default_factory=Scale)
    judge_scale: Scale = field(default_factory=Scale)
    watch: Stopwatch = field(default_factory=Stopwatch)
    passes: int = 0
    shared: ShardedGame | None = None
    workers: GameWorkers | None = None

    def forward_pass(
        self,
        batch: Sequence[QARecord],
        *,
        seed: int | None = None,
        criticised: Sequence[QARecord] | None = None,
    ) -> MinMaxOutput:
        """Answer, criticise, score: the monitor's batch of one step, and the policy's answers.

        Args:
            batch: S stories.
            seed: seed of the sampling and of the made-up answers; None counts the passes without one, from
                the run's seed.
            criticised: stories whose answers are criticised, one each; None for those of the batch.
        """
        if seed is None:
            seed = seeds.step_seed(self.config.seed, self.passes)
            self.passes += 1
        game, rng = self.config.game, random.Random(seed)
        answers = self.answer(self.players.policy, batch, game.num_generations, seed=seed)
        rewards = self.rewards(batch, answers)
        first = list(range(0, len(answers), game.num_generations))
        sampled, sampled_rewards = [answers[i] for i in first], rewards[first]
        stories = batch if criticised is None else criticised
        if criticised is not None:
            sampled = self.answer(self.players.policy, stories, 1, seed=seed)
            sampled_rewards = self.rewards(stories, sampled)
        made_up = self._made_up(stories, [answer.correct for answer in sampled], rng)
        criticised_answers = sampled + made_up
        criticised_rewards = torch.cat([sampled_rewards, self.rewards(stories, made_up)])
        records = batch
        if criticised is not None:
            records = [*batch, *criticised]
            behind = len(batch)
            criticised_answers = [replace(each, story=each.story + behind) for each in criticised_answers]
        return self._criticised(records, answers, rewards, criticised_answers, criticised_rewards, seed=seed)

    def _criticised(
        self,
        batch: Sequence[QARecord],
        answers: list[Answer],
        rewards: Tensor,
        criticised_answers: list[Answer],
        criticised_rewards: Tensor,
        *,
        seed: int,
    ) -> MinMaxOutput:
        game = self.config.game
        critiques = self.criticise(batch, criticised_answers, game.num_critiques, seed=seed)
        judge_scores = self.judge_scores(batch, criticised_answers, critiques)
        of = torch.tensor([c.answer for c in critiques])
        correct = [criticised_answers[c.answer].correct for c in critiques]
        labels = torch.tensor([each is True for each in correct])
        known = torch.tensor([each is not None for each in correct])
        violation, weighted = self.violation(critiques, labels, known)
        return MinMaxOutput(
            records=batch,
            answers=answers,
            rewards=rewards,
            judged=criticised_answers,
            judged_rewards=criticised_rewards,
            critiques=critiques,
            judge_scores=judge_scores,
            combined=game.w_reward * criticised_rewards[of] + self.w_judge * judge_scores,
            labels=labels,
            known=known,
            violation=violation,
            weighted_violation=weighted,
        )

    def answer(
        self, player: PolicyModel, batch: Sequence[QARecord], n: int, *, seed: int, greedy: bool = False
    ) -> list[Answer]:
        """`n` answers of a policy to each story, those of a story adjacent."""
        prompts = [self.prompts.policy(record) for record in batch]
        with self.watch.timing("answers"):
            groups = self._generate(player, prompts, n, seed, greedy, self.config.policy_model)
        return [
            self.read_answer(batch, story, _text(player, rollout), rollout)
            for story, group in enumerate(groups)
            for rollout in group
        ]

    def read_answer(
        self, batch: Sequence[QARecord], story: int, text: str, rollout: Rollout | None = None
    ) -> Answer:
        """Read what an answer claims, and whether that is right, where the story has a label."""
        record, rules = batch[story], self.prompts.rules
        claim = rules.claim(record, text)
        if record.answer is None:
            return Answer(story, text, claim, None, None, rollout)
        return Answer(story, text, claim, claim == record.answer_text, rules.is_hack(record, claim), rollout)

    def criticise(
        self, batch: Sequence[QARecord], answers: Sequence[Answer], k: int, *, seed: int, greedy: bool = False
    ) -> list[CritiqueSample]:
        """`k` critiques of the monitor for each answer, those of an answer adjacent."""
        player = self.players.monitor
        prompts = [self.prompts.monitor(batch[answer.story], answer.text) for answer in answers]
        with self.watch.timing("critiques"):
            seed += seeds.CRITIQUES
            groups = self._generate(player, prompts, k, seed, greedy, self.config.monitor_model)
        return [
            self._read_critique(batch[answers[i].story], answers[i], i, _text(player, rollout), rollout)
            for i, group in enumerate(groups)
            for rollout in group
        ]

    def rewards(self, batch: Sequence[QARecord], answers: Sequence[Answer]) -> Tensor:
        """(A,) standardised reward-model scores of answers."""
        if not answers:
            return torch.zeros(0)
        prompts = [self.prompts.policy(batch[answer.story]) for answer in answers]
        texts = [answer.text for answer in answers]
        budget = self.config.training.max_tokens_per_batch
        with self.watch.timing("score"):
            return self.reward_scale(self.reward_model.score(prompts, texts, max_tokens=budget))

    def judge_scores(
        self, batch: Sequence[QARecord], answers: Sequence[Answer], critiques: Sequence[CritiqueSample]
    ) -> Tensor:
        """(C,) standardised judge scores; an unparsable critique is not shown to the judge."""
        of_each = [answers[critique.answer] for critique in critiques]
        return self.judged(batch, of_each, [each.text if each.parsed else None for each in critiques])

    def judged(
        self, batch: Sequence[QARecord], answers: Sequence[Answer], critiques: Sequence[str | None]
    ) -> Tensor:
        """(B,) standardised judge scores of answers with a critique's text each, None for none."""
        records = [batch[answer.story] for answer in answers]
        with self.watch.timing("score"):
            if isinstance(self.judge, Validator):
                return self.judge_scale(self.judge.check(records, [a.claim for a in answers], critiques))
            texts = [answer.text for answer in answers]
            return self.judge_scale(self.judge.score([r.question for r in records], texts, critiques))

    def policy_judge_scores(
        self, batch: Sequence[QARecord], answers: Sequence[Answer], *, seed: int
    ) -> Tensor:
        """(A,) the judge's part of the policy's reward, standardised: by fresh critiques, checks, or neither.

        The mean over `policy_critiques` critiques; with a validator that does not leave the choice to the
        monitor, its own checks, or the mean of both (`mixed`); without critiques the bare scores.
        """
        count, by_others = self.config.game.policy_critiques, None
        if isinstance(self.judge, Validator) and self.judge.chooser != "monitor":
            asked = [(batch[answer.story], answer.claim) for answer in answers]
            by_others = self.judge_scale(self.judge.check_without_critiques(asked, count, seed=seed))
            if self.judge.chooser != "mixed":
                return by_others
        if count == 0:
            return self.bare_judge_scores(batch, answers)
        critiques = self.criticise(batch, answers, count, seed=seed)
        by_monitor = self.judge_scores(batch, answers, critiques).view(len(answers), -1).mean(1)
        return by_monitor if by_others is None else (by_monitor + by_others) / 2

    def bare_judge_scores(self, batch: Sequence[QARecord], answers: Sequence[Answer]) -> Tensor:
        """(A,) standardised judge scores of answers without a critique; equal ones are judged once."""
        asked = [(batch[answer.story].question, answer.text) for answer in answers]
        place = {pair: index for index, pair in enumerate(dict.fromkeys(asked))}
        different = [answers[asked.index(pair)] for pair in place]
        return self.judged(batch, different, [None] * len(place))[torch.tensor([place[p] for p in asked])]

    def violation(
        self, critiques: Sequence[CritiqueSample], labels: Tensor, known: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(C,) violations of critiques, plain and as the constraint counts them.

        (C,) `labels` are those of the criticised answers; `known` says which critiques
        have one, None that all have.
        """
        measure = self.config.constraint.measure
        parsed_only = not self.config.constraint.check_evidence
        errors = violations(
            labels,
            torch.tensor([c.said_right for c in critiques]),
            torch.tensor([c.confidence for c in critiques]),
            torch.tensor([c.parsed is not None if parsed_only else c.grounded for c in critiques]),
            measure=measure,
            known=known,
        )
        return errors, weighted_violations(errors, labels, measure=measure, known=known)

    def made_up_answer(
        self, batch: Sequence[QARecord], story: int, correct: bool, rng: random.Random
    ) -> Answer:
        """A templated answer with the right choice or a wrong one."""
        record = batch[story]
        wrong = [choice for choice in record.choices if choice != record.answer_text]
        choice = record.answer_text if correct else rng.choice(wrong)
        return self.read_answer(batch, story, self.prompts.made_up(choice))

    def _made_up(
        self, batch: Sequence[QARecord], sampled_correct: list[bool | None], rng: random.Random
    ) -> list[Answer]:
        """Made-up answers to labelled stories, of the label that is rarer among the policy's own answers."""
        labelled = [story for story, record in enumerate(batch) if record.answer is not None]
        known = [correct for correct in sampled_correct if correct is not None]
        count = min(round(self.config.game.tampered_fraction * len(batch)), len(labelled))
        num_correct = min(max((len(known) + count) // 2 - sum(known), 0), count)
        stories = rng.sample(labelled, count)
        return [self.made_up_answer(batch, s, i < num_correct, rng) for i, s in enumerate(stories)]

    def _generate(
        self, player: PolicyModel, prompts: list[str], n: int, seed: int, greedy: bool, config: PlayerConfig
    ) -> list[list[Rollout]]:
        ids = [prompt_ids(player.tokenizer, prompt, config) for prompt in prompts]
        params = SamplingParams(config.max_new_tokens, 0.0 if greedy else config.temperature, seed)
        if self.workers is not None:
            return self.workers.generate(player, ids, n, params)
        training = self.config.training
        sample = in_batches if self.shared is None else self.shared.generate
        with player.active() as model:
            engine = TransformersEngine(model, player.tokenizer, max_batch_tokens=training.max_kv_tokens)
            return all_gather(sample(engine, shard(ids), n, params, training.prompts_per_batch))

    def _read_critique(
        self, record: QARecord, answer: Answer, index: int, text: str, rollout: Rollout
    ) -> CritiqueSample:
        parsed = parse_critique(text) if rollout.finish_reason == "stop" else None
        if parsed is None:
            return CritiqueSample(index, text, None, False, False, 0.5, rollout)
        valid = self.prompts.rules.evidence_holds(record, parsed.evidence)
        supports = self.prompts.rules.supports(parsed.evidence, answer.claim)
        agrees = supports is None or supports == (parsed.verdict == "right")
        confidence = parsed.confidence
        if confidence is None:
            confidence = verdict_probability(self.players.monitor.tokenizer, parsed.verdict, rollout)
        return CritiqueSample(index, text, parsed, valid, valid and agrees, confidence, rollout)


def _text(player: PolicyModel, rollout: Rollout) -> str:
    return player.tokenizer.decode(rollout.completion_ids, skip_special_tokens=True)
