"""Elastic weight consolidation: weights that an earlier task needs are held where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlhf_algos.parallel.sharding import reshard
from rlhf_algos.process_group import all_reduce
from rlhf_data import TokenSequence, UserError, pack
from rlhf_models import evaluating, token_distributions, token_logps

Fisher = Literal["true", "empirical"]
_ANCHOR, _IMPORTANCE = "anchor.", "importance."


def quadratic_penalty(values: Tensor, anchors: Tensor, importance: Tensor) -> Tensor:
    """How far weights are from where they should stay, a sum.

    ½ Σ_i F_i (θ_i − θ*_i)², eq. 3 of Kirkpatrick et al. 2017, arXiv:1612.00796, without λ.

    Args:
        values: θ, of any shape, with gradient.
        anchors: θ*, of that shape.
        importance: F, of that shape, >= 0; ones make it L2-SP (Li et al. 2018, arXiv:1802.01483, eq. 2).
    """
    return 0.5 * (importance * (values - anchors).square()).sum()


class ElasticWeightConsolidation:
    """Penalises the distance of trained weights from their start, each by its importance for an earlier task.

    The importance is the diagonal of the Fisher information on rows of that task, a mean over rows of the
    squared gradient of log π of a row's scored tokens.  `true` takes tokens drawn from the model at each
    place, which is the Fisher information; `empirical` those of the rows, which is an approximation that
    vanishes where the model fits them (Kunstner et al. 2019, arXiv:1905.12558).  It is divided by its mean,
    so that `strength` does not depend on the model.  Without `estimate` every weight has the importance 1:
    L2-SP.

    Of a model with LoRA adapters the anchor is the model without them, and what is penalised is the update of
    each adapted matrix, scale · B A, by the importance of that matrix.

    Of a model that FSDP shards each process holds importances and anchors of its part; every process must
    make every call, with the same rows.

    Args:
        model: a transformers causal LM, or a PeftModel around one, at its start.
        strength: λ.
        decay: γ, what remains of the importance of earlier tasks when `estimate` is called again for a
            further one, whose start becomes the anchor (Schwarz et al. 2018, arXiv:1805.06370, section 4).
        scorer: of a sharded model the module that scores with it, such as a trainer's.

    Raises:
        UserError: nothing of the model is trained, or it has adapters and is sharded.
    """

    def __init__(self, model: Any, *, strength: float, decay: float = 1.0, scorer: Any = None) -> None:
        self.model, self.strength, self.decay = model, strength, decay
        self._adapted, self._scorer = hasattr(model, "peft_config"), scorer
        self._scores: Any = partial(token_logps, model)
        self._distributions: Any = partial(token_distributions, model)
        if scorer is not None:
            self._scores, self._distributions = scorer, partial(scorer, distributions=True)
        if self._adapted and scorer is not None:
            raise UserError(
                "weights of a sharded model with adapters cannot be held; leave out ewc_strength, fsdp or "
                "use_peft",
                code="unsupported_key",
                key="ewc_strength",
            )
        self.importance: dict[str, Tensor] = {}
        self.anchors: dict[str, Tensor] = {}
        self._anchor()
        if not self.anchors:
            raise UserError("no weight of the model is trained, so none can be held", code="nothing_trained")

    def estimate(
        self, rows: Sequence[TokenSequence], *, fisher: Fisher = "true", seed: int = 0
    ) -> dict[str, Tensor]:
        """Measure what these rows need, add it to what earlier ones needed, and anchor the weights here.

        Args:
            rows: of the earlier task; a few hundred are enough.
            fisher: see the class.
            seed: of the tokens that are drawn.

        Returns:
            The new importances, by the name of the weight.

        Raises:
            UserError: no row has a token to score.
        """
        rows = [row for row in rows if row.scored()]
        if not rows:
            raise UserError("no row to estimate importances on has a completion", code="nothing_to_learn")
        weights, device = self._weights(), next(self.model.parameters()).device
        trained = {name: weight.requires_grad for name, weight in weights.items()}
        generator = torch.Generator().manual_seed(seed)
        sums = {name: torch.zeros_like(_own(weight)) for name, weight in weights.items()}
        try:
            for weight in weights.values():
                weight.requires_grad_(True)
            with evaluating(self.model), torch.enable_grad():
                for row in rows:
                    logp = self._logp(row, fisher, generator, device)
                    for name, grad in zip(weights, self._gradients(logp, weights), strict=True):
                        if grad is not None:
                            sums[name] += _own(grad).square()
        finally:
            for name, weight in weights.items():
                weight.requires_grad_(trained[name])
        total = self._over_processes(torch.stack([each.sum() for each in sums.values()]).sum())
        count = sum(weight.numel() for weight in weights.values())
        scale = count / float(total) if total > 0 else 0.0
        for name, found in sums.items():
            self.importance[name] = self.decay * self.importance.get(name, 0.0) + found * scale
        self._anchor()
        return self.importance

    def penalty(self) -> Tensor:
        """λ ½ Σ F (θ − θ*)², a scalar with gradient."""
        parts = [
            quadratic_penalty(value, self.anchors[name], self._importance_of(name, value))
            for name, value in self._held()
        ]
        return self.strength * torch.stack(parts).sum()

    def add_gradient(self, *, scale: float = 1.0) -> dict[str, float]:
        """Add the penalty's gradient to that of the trained weights.

        Args:
            scale: of the loss, where it is multiplied against underflow.

        Returns:
            `ewc_loss`, the penalty, and `ewc_distance`, the norm of θ − θ*.
        """
        with torch.enable_grad():
            penalty = self.penalty()
            (penalty * scale).backward()
        with torch.no_grad():
            squares = [(value - self.anchors[name]).square().sum() for name, value in self._held()]
        sums = self._over_processes(torch.stack([penalty.detach(), torch.stack(squares).sum()]))
        return {"ewc_loss": float(sums[0]), "ewc_distance": float(sums[1].sqrt())}

    def save(self, path: str | Path) -> None:
        """Write importances and anchors into one safetensors file; those of a sharded model are not kept.

        Raises:
            ValueError: the model is sharded.
        """
        if self._scorer is not None:
            raise ValueError("a process has a part of the importances only; keep the rows and measure again")
        state = {_ANCHOR + name: tensor for name, tensor in self.anchors.items()}
        state |= {_IMPORTANCE + name: tensor for name, tensor in self.importance.items()}
        save_file({name: tensor.contiguous().cpu() for name, tensor in state.items()}, path)

    def load(self, path: str | Path) -> None:
        """Restore the state that `save` wrote.

        Raises:
            UserError: it is of another model.
        """
        state = load_file(path)
        for name, anchor in self.anchors.items():
            if state.get(_ANCHOR + name, torch.empty(0)).shape != anchor.shape:
                raise UserError(
                    f"{path} is of another model: it has no {name} of this shape; give that of this model",
                    code="weights_do_not_fit",
                )
            self.anchors[name] = state[_ANCHOR + name].to(anchor.device)
            if _IMPORTANCE + name in state:
                self.importance[name] = state[_IMPORTANCE + name].to(anchor.device)

    def _logp(self, row: TokenSequence, fisher: Fisher, generator: torch.Generator, device: Any) -> Tensor:
        (batch,) = pack([row])
        batch = batch.to(device)
        if fisher == "true":
            with torch.no_grad():
                likely = self._distributions(batch).distributions
            assert likely is not None
            drawn = torch.multinomial(likely.exp().cpu(), 1, generator=generator)[:, 0]
            batch = replace(batch, score_targets=drawn.to(device))
        return self._scores(batch).logps.sum()

    def _gradients(self, logp: Tensor, weights: dict[str, nn.Parameter]) -> list[Tensor | None]:
        if self._scorer is None:
            return list(torch.autograd.grad(logp, list(weights.values()), allow_unused=True))
        logp.backward()  # the mean over all processes, which have the same row
        found = [weight.grad for weight in weights.values()]
        for weight in weights.values():
            weight.grad = None
        return found

    def _over_processes(self, sums: Tensor) -> Tensor:
        return sums if self._scorer is None else all_reduce(sums)

    def _weights(self) -> dict[str, nn.Parameter]:
        """The weights whose importance counts: those that are trained, or that adapters change."""
        if self._scorer is not None:
            reshard(self._scorer)
        if self._adapted:
            return {name: layer.base_layer.weight for name, layer in self._layers()}
        return {name: each for name, each in self.model.named_parameters() if each.requires_grad}

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        """The held parameters, with gradient: trained weights, or the updates of adapted matrices."""
        if not self._adapted:
            for name, weight in self._weights().items():
                yield name, _own(weight)
            return
        for name, layer in self._layers():
            update: Callable[[str], Tensor] = layer.get_delta_weight
            yield name, torch.stack([update(each) for each in layer.active_adapters]).sum(0)

    def _layers(self) -> list[tuple[str, Any]]:
        return [
            (name, module)
            for name, module in self.model.named_modules()
            if hasattr(module, "get_delta_weight")
        ]

    def _anchor(self) -> None:
        zero = torch.zeros_like if self._adapted else torch.clone
        self.anchors = {name: zero(_own(weight).detach()) for name, weight in self._weights().items()}

    def _importance_of(self, name: str, value: Tensor) -> Tensor:
        return self.importance[name] if name in self.importance else torch.ones_like(value)


def _own(weight: Tensor) -> Tensor:
    """This process's part of a weight, with gradient: all of it where it is not sharded."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
