"""How a tree is searched (strategy, widths, budget, steps, constants of MCTS), and how steps are labelled."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_data import BaseConfig

SearchStrategy = Literal["mcts", "beam", "dvts", "best-first", "best-of-n", "ab-mcts"]
"""Which nodes are extended next, see `strategies`, `mcts` and `treequest` in `rlhf_infer.search`."""
_BRANCHES = (4, 3, 2, 1)


class SearchSettings(BaseConfig):
    """How the tree of a prompt is searched."""

    strategy: SearchStrategy = "mcts"
    """Which nodes are extended next."""
    width: int = Field(default=8, ge=1)
    """Draws of a prompt in a wave: `width / branch` nodes get `branch` children each; best-of-n draws `width`
    completions."""
    branch: int | None = Field(default=None, ge=1)
    """Children drawn of a node at a time; a divisor of `width`; null for 4, or else 3, 2 or 1."""
    budget_tokens: int = Field(default=2048, ge=1)
    """Tokens generated for a prompt at most, those of repeated and abandoned steps included."""
    rounds: int | None = Field(default=1, ge=1)
    """Beam and DVTS: how often they start anew at the prompt; null for as long as there are tokens."""
    stop_score: float | None = None
    """A prompt's search ends once a finished completion has this score; null for never."""
    selection: Literal["best", "majority", "weighted"] = "best"
    """Which of the finished completions wins, see `rlhf_infer.select`."""
    separator: str | None = Field(default=None, min_length=1)
    """Text that ends a step; null for that of the process reward model, or else a line break."""
    max_step_tokens: int = Field(default=64, ge=1)
    """Tokens of a step at most; a longer one goes on in the next node."""
    aggregate: Literal["last", "min", "product", "mean"] | None = None
    """How a process reward model's step scores become one; null for what comes with it, or else last."""
    formula: Literal["puct", "uct"] = "puct"
    """MCTS: the bonus for exploring."""
    c: float = Field(default=0.3, ge=0)
    """MCTS: weight of the bonus."""
    prior: Literal["uniform", "logprob"] = "uniform"
    """MCTS: priors of siblings, equal, or by the probabilities by which they were drawn already."""
    widen: bool = True
    """MCTS: whether a node may get more than `branch` draws, where a new child promises more than the old."""
    virtual_loss: float = Field(default=1.0, ge=0)
    """MCTS: visits of value 0 that a path counts for each draw under way, so that a wave spreads."""
    backup: Literal["mean", "max"] = "max"
    """MCTS: a node's value, the mean or the largest of the scores in its subtree."""

    @model_validator(mode="after")
    def _branch_divides_width(self) -> SearchSettings:
        if self.branch is not None and self.width % self.branch:
            raise ValueError(
                f"width {self.width} is not a multiple of branch {self.branch}; choose a multiple of it"
            )
        return self

    @property
    def children(self) -> int:
        """`branch`, or what null stands for."""
        return self.branch or next(each for each in _BRANCHES if self.width % each == 0)

    @property
    def nodes(self) -> int:
        """Nodes of a tree that are extended in a wave."""
        return self.width // self.children


class StepLabelSettings(BaseConfig):
    """How steps are labelled."""

    solutions: int = Field(default=4, ge=1)
    """Solutions drawn of a prompt, each of which becomes a row; equal ones become one."""
    completions: int = Field(default=8, ge=1)
    """Completions drawn after every step."""
    estimation: Literal["hard", "soft"] = "hard"
    """Label of a step: 1 if any completion after it is right, else 0; or the share that is right."""
    right_from: float = 0.5
    """Smallest score of the verifier at which a completion counts as right."""
    separator: str = Field(default="\n", min_length=1)
    """Text that ends a step."""
