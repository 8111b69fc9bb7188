"""Reward models and judges that are adapters, each with a head, on the players' backbone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from transformers import AutoModelForSequenceClassification

from rlhf_data import Text, UserError
from rlhf_minmax.config.run import MinMaxConfig, PlayerConfig
from rlhf_minmax.config.scorers import JudgeConfig, RewardModelConfig
from rlhf_minmax.players.players import backbone_settings, share_backbone
from rlhf_models import (
    AdapterSet,
    DeviceManager,
    PolicyModel,
    ScalarModel,
    adapter_base,
    brings_head,
    is_adapter,
    share_trunk,
)

Host = Literal["policy", "monitor"]
"""The player whose backbone carries a scorer's adapter."""


@dataclass(frozen=True)
class SharedScorer:
    """A scorer whose adapter is in use on the players' backbone while it scores, and at no other time."""

    model: ScalarModel
    adapters: AdapterSet
    adapter: str

    def score(
        self, prompts: Sequence[Text], completions: Sequence[Text], *, max_tokens: int | None = None
    ) -> Tensor:
        """(B,) scores of B completions after their prompts; see the model's own `score`."""
        with self.adapters.use(self.adapter):
            return self.model.score(prompts, completions, max_tokens=max_tokens)


def load_shared(
    kind: type[ScalarModel], folder: str | Path, player: PolicyModel, adapter: str
) -> SharedScorer:
    """Put a scorer's adapter on a player's backbone, frozen and in none of the players' parameters."""
    adapters = player.adapters
    assert adapters is not None, "scorer_host names players with adapters"
    adapters.add_frozen(adapter, folder)
    backbone: Any = adapters.model.get_base_model()
    model = kind(*share_trunk(AutoModelForSequenceClassification, backbone, folder))
    return SharedScorer(model, adapters, adapter)


def scorer_host(
    role: str, section: RewardModelConfig | JudgeConfig, config: MinMaxConfig, devices: DeviceManager
) -> Host | None:
    """The player on whose backbone a scorer is an adapter; None for one with its own model.

    It is an adapter where its folder holds one with a head that was trained on the player's model, the player
    trains an adapter too, and device and quantisation are the same. `share_backbone` true demands it, and
    takes the backbone's quantisation; false forbids it.
    """
    if section.share_backbone is False or getattr(section, "kind", "head") != "head":
        return None
    players: tuple[Host, ...] = ("policy",) if share_backbone(config) else ("policy", "monitor")
    obstacles: list[str] = []
    for player in players:
        obstacle = _obstacle(role, section, player, config, devices)
        if obstacle is None:
            return player
        obstacles.append(obstacle)
    if section.share_backbone:
        raise UserError(
            f"the {role} model cannot share the players' backbone, as share_backbone demands: "
            + "; ".join(dict.fromkeys(obstacles)),
            code="cannot_share_backbone",
        )
    return None


def _obstacle(
    role: str,
    section: RewardModelConfig | JudgeConfig,
    player: Host,
    config: MinMaxConfig,
    devices: DeviceManager,
) -> str | None:
    """Why a scorer cannot be an adapter on a player's backbone, with what to do; None if it can."""
    settings: PlayerConfig = getattr(config, f"{player}_model")
    if share_backbone(config):
        settings = backbone_settings(config)
    folder = section.model_name
    if folder is None or not is_adapter(folder):
        command = "judge" if isinstance(section, JudgeConfig) else "reward"
        return (
            f"{folder or 'what is built from the training rows'} is a full model; train an adapter on the "
            f"players' model with `rlhf-train {command} --set use_peft=true --model ...`"
        )
    base, model = adapter_base(folder), settings.model_name
    if model is None or Path(base).resolve() != Path(model).resolve():
        other = model or "built from the training rows"
        return f"its base is {base} and the {player} is {other}; give the {player} that base"
    if not settings.use_lora:
        return f"the {player} trains all its weights; set {player}_model.use_lora true"
    if not brings_head(folder):
        return f"the adapter in {folder} brings no score head; name an adapter of a reward model or judge"
    placed = devices.device(role.removeprefix("held-out ")), devices.device(player)
    if placed[0] != placed[1]:
        return f"it is sent to {placed[0]} and the {player} to {placed[1]}; set both to one device in devices"
    more_exact = not section.load_in_8bit and (settings.load_in_8bit or settings.load_in_4bit)
    if (section.load_in_8bit and not settings.load_in_8bit) or (
        more_exact and section.share_backbone is None
    ):
        return f"it and the {player} are quantised differently; make load_in_8bit of both equal"
    return None
