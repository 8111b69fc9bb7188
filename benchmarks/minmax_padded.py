"""MinMax the padded way, as a careful user writes it on transformers and peft: the peer of `minmax_speed.py`.

Six models: each player with a LoRA adapter, a frozen copy of each as its reference, reward model and judge.
Prompts are padded on the left and repeated for each sample, in `generate` (one call for all, with its cache)
as in training; completions follow in rows, logits are computed at their positions only, log-probs from whole
logits as TRL takes them. Rows of like length share a pass, within the same number of tokens as ours. The
log-probs of the first update are the old ones, entropies are left out: both spare the peer work.

`references: adapters_off` takes each player without its adapter for its reference: four models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from minmax_work import ROLES, VowelReward, script
from online_pace import Task
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import rlhf_minmax.game.forward_pass
import rlhf_minmax.optim.dual_ppo
from rlhf_algos import create_optimizer
from rlhf_algos.losses import clipped_policy_loss, kl_k3
from rlhf_infer import Rollout, RuleJudge, SamplingParams
from rlhf_minmax import MinMaxConfig, MinMaxPipeline, MinMaxTrainer
from rlhf_minmax.config.run import PlayerConfig
from rlhf_minmax.game.prompts import Prompts
from rlhf_minmax.game.stories import Stories
from rlhf_minmax.players.players import Players

Ids = Sequence[int]


class PaddedPlayer:
    """A model of its own with one adapter, and its reference.

    Args:
        task: names the folders.
        role: the adapter's.
        own_reference: whether the reference is a copy; else the adapter is switched off for it.
    """

    adapter = "default"

    def __init__(self, task: Task, role: str, *, own_reference: bool) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(task.path("base"))
        self.model: Any = PeftModel.from_pretrained(_load_lm(task), task.path(role), is_trainable=True).eval()
        self._copy = _load_lm(task) if own_reference else None
        self.device = self.model.device

    def parameters(self) -> list[torch.nn.Parameter]:
        """The adapter's."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """The model, which is nobody else's."""
        return contextlib.nullcontext(self.model)

    @contextlib.contextmanager
    def reference(self) -> Iterator[Any]:
        """The model as it was at the start."""
        with contextlib.nullcontext() if self._copy else self.model.disable_adapter():
            yield self._copy or self.model


def _load_lm(task: Task) -> Any:
    return AutoModelForCausalLM.from_pretrained(task.path("base"), dtype=torch.float32).eval()


class PaddedEngine:
    """One call of transformers' `generate`; what it has drawn is exchanged for the script."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer

    @torch.no_grad()
    def generate(self, prompts: Sequence[Ids], n: int, params: SamplingParams) -> list[list[Rollout]]:
        """See `rlhf_infer.TransformersEngine.generate`; without log-probs, which are computed in training."""
        tokens = params.max_new_tokens
        ids, mask = _pad(prompts, self.tokenizer.pad_token_id, left=True)
        drawn = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=params.temperature,
            top_k=0,
            num_return_sequences=n,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        assert drawn.shape == (n * len(prompts), ids.shape[1] + tokens)
        texts = [self.tokenizer.decode(prompt) for prompt in prompts]
        return [
            [
                Rollout(prompt, script(self.tokenizer, text, i, tokens), [0.0] * tokens, "stop")
                for i in range(n)
            ]
            for prompt, text in zip(prompts, texts, strict=True)
        ]


@dataclass(frozen=True)
class _Rows:
    """Rows of one pass: indices of their rollouts, tokens with their mask, which completion tokens count."""

    members: list[int]
    input_ids: Tensor
    attention_mask: Tensor
    counts: Tensor


class PaddedOptimizer:
    """Takes the place of `PlayerOptimizer`: updates on padded rows, with its arguments.

    `first_logps` are the log-probs of the completions before the last updates.
    """

    def __init__(
        self,
        player: PaddedPlayer,
        settings: PlayerConfig,
        config: MinMaxConfig,
        *,
        learning_rate: float,
        total_steps: int,
    ) -> None:
        del total_steps  # the rate is constant
        self.player, self.temperature, self.learning_rate = player, settings.temperature, learning_rate
        self.epsilon, self.beta = config.game.epsilon, config.game.beta
        self.max_grad_norm = config.training.max_grad_norm
        self.max_tokens = config.training.max_tokens_per_batch
        self.parameters = player.parameters()
        self.optimizer = create_optimizer(
            self.parameters,
            learning_rate=learning_rate,
            betas=settings.adam_betas,
            weight_decay=settings.weight_decay,
        )
        self.first_logps: list[list[float]] = []

    def begin_step(self, step: int) -> float:
        """See `PlayerOptimizer.begin_step`."""
        del step
        return self.learning_rate

    def update(self, rollouts: Sequence[Rollout], advantages: Tensor, *, updates: int) -> dict[str, float]:
        """See `PlayerOptimizer.update`; there is no KL stop."""
        parts = self._rows(rollouts)
        total = sum(len(rollout.completion_ids) for rollout in rollouts)
        player = self.player
        with torch.no_grad(), player.reference() as model:
            ref_logps = [self._logps(model, part) for part in parts]
        old_logps: list[Tensor] = []
        metrics: dict[str, float] = {}
        player.model.train()
        for done in range(updates):
            sums = torch.zeros(2)
            for i, part in enumerate(parts):
                logps = self._logps(player.model, part)
                if not done:
                    old_logps.append(logps.detach())
                spread = advantages[part.members][part.counts.nonzero()[:, 0]]
                policy = clipped_policy_loss(
                    logps, old_logps[i], spread, clip_low=self.epsilon, clip_high=self.epsilon
                )
                divergence = kl_k3(logps, ref_logps[i]).sum()
                loss = policy.loss + self.beta * divergence
                (loss / total).backward()
                sums += torch.stack([loss, divergence]).detach()
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            loss, kl = (sums / total).tolist()
            metrics = {"loss": loss, "kl": kl, "grad_norm": float(norm), "updates": done + 1}
        player.model.eval()
        found: dict[int, list[float]] = {}
        for part, logps in zip(parts, old_logps, strict=True):
            rows = logps.split(part.counts.sum(1).tolist())
            found |= zip(part.members, (row.tolist() for row in rows), strict=True)
        self.first_logps = [found[i] for i in range(len(rollouts))]
        return metrics | {"num_tokens": sum(part.input_ids.numel() for part in parts) * updates}

    def _rows(self, rollouts: Sequence[Rollout]) -> list[_Rows]:
        pad = self.player.tokenizer.pad_token_id
        parts = []
        for members in _cut([len(r.prompt_ids) + len(r.completion_ids) for r in rollouts], self.max_tokens):
            prompts, prompt_mask = _pad([rollouts[i].prompt_ids for i in members], pad, left=True)
            completions, counts = _pad([rollouts[i].completion_ids for i in members], pad)
            ids, mask = torch.cat([prompts, completions], 1), torch.cat([prompt_mask, counts], 1)
            parts.append(_Rows(members, ids, mask, counts.bool()))
        return parts

    def _logps(self, model: Any, part: _Rows) -> Tensor:
        """(M,) log-probs of the completions' tokens, row by row."""
        width = part.counts.shape[1]
        logits = model(
            input_ids=part.input_ids,
            attention_mask=part.attention_mask,
            position_ids=(part.attention_mask.cumsum(1) - 1).clamp(min=0),
            logits_to_keep=width + 1,
            use_cache=False,
        ).logits[:, :-1]
        logits = logits / self.temperature
        chosen = logits.gather(-1, part.input_ids[:, -width:, None])[..., 0]
        norms = torch.stack([row.logsumexp(-1) for row in logits])  # row by row: less memory
        return (chosen - norms)[part.counts]


class PaddedScorer:
    """A transformers sequence classifier on rows that are padded on the right.

    Args:
        folder: of the model.
        max_tokens: tokens of a pass, padding included.
    """

    def __init__(self, folder: str, max_tokens: int) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        self.max_tokens = max_tokens

    @torch.no_grad()
    def score(
        self, prompts: Sequence[str], completions: Sequence[str], *, max_tokens: int | None = None
    ) -> Tensor:
        """See `rlhf_minmax.game.scores.Scorer`."""
        del max_tokens
        texts = [
            self.tokenizer.encode(prompt) + self.tokenizer.encode(completion)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        scores = torch.zeros(len(texts))
        for members in _cut([len(text) for text in texts], self.max_tokens):
            ids, mask = _pad([texts[i] for i in members], self.tokenizer.pad_token_id)
            scores[members] = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, 0]
        return scores


class PaddedJudge:
    """A judge with a head, on padded rows."""

    def __init__(self, scorer: PaddedScorer, prompts: Prompts) -> None:
        self.scorer, self.prompts = scorer, prompts

    def score(
        self, questions: Sequence[str], answers: Sequence[str], critiques: Sequence[str | None]
    ) -> Tensor:
        """See `rlhf_infer.judges.prompted.Judge.score`."""
        prompts = [self.prompts.judge(q, a) for q, a in zip(questions, answers, strict=True)]
        return self.scorer.score(prompts, [critique or "" for critique in critiques]).sigmoid()


def build_trainer(task: Task, config: MinMaxConfig, stories: Stories) -> MinMaxTrainer:
    """The trainer with the peer's players, engine, updates and scorers."""
    modules: Any = rlhf_minmax
    modules.pipeline.TransformersEngine = PaddedEngine
    modules.optimizer.PlayerOptimizer = PaddedOptimizer
    own = task.settings["references"] == "copies"
    policy, monitor = (PaddedPlayer(task, role, own_reference=own) for role in ROLES)
    players: Any = Players(policy, monitor, None, shared=False)  # pyright: ignore[reportArgumentType]
    reward: Any = VowelReward()
    judge: Any = RuleJudge()
    if task.settings["scorers"] == "models":
        limit = config.training.max_tokens_per_batch
        reward = PaddedScorer(task.path("reward"), limit)
        judge = PaddedJudge(PaddedScorer(task.path("judge"), limit), stories.prompts)
    pipeline = MinMaxPipeline(players, reward, judge, stories.prompts, config)
    return MinMaxTrainer(pipeline, config, stories.train)


def _cut(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices of rows, like lengths together, so that rows times the longest stay within the limit."""
    members: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if members and (len(members) + 1) * lengths[i] > max_tokens:
            yield members
            members = []
        members.append(i)
    if members:
        yield members


def _pad(rows: Sequence[Ids], pad: int, *, left: bool = False) -> tuple[Tensor, Tensor]:
    """Token ids (B, L) of rows with padding, and 1 where there is none."""
    width = max(map(len, rows))
    gaps = [width - len(row) for row in rows]
    pairs = list(zip(rows, gaps, strict=True))
    if left:
        ids = [[pad] * gap + list(row) for row, gap in pairs]
        mask = [[0] * gap + [1] * len(row) for row, gap in pairs]
    else:
        ids = [list(row) + [pad] * gap for row, gap in pairs]
        mask = [[1] * len(row) + [0] * gap for row, gap in pairs]
    return torch.tensor(ids), torch.tensor(mask)
