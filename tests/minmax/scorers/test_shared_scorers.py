"""Reward models and judges that are adapters on the players' backbone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from files import CLOCK
from raises import raises_error
from rlhf_data import RunFolder, TokenSequence, UserError, load_qa, pack
from rlhf_minmax import MinMaxConfig, MinMaxPipeline, MinMaxTrainer
from rlhf_minmax.game.stories import Stories, load_stories
from rlhf_minmax.game.validator import Validator
from rlhf_minmax.players.players import load_players
from rlhf_minmax.run.checks import check_run
from rlhf_minmax.run.dry_run import plan_run
from rlhf_minmax.scorers.loading import HeadJudge, ScorerLoader, scorer_hosts
from rlhf_minmax.scorers.shared_trunk import SharedScorer
from rlhf_models import DeviceManager, JudgeModel, LoraSettings, RewardModel, load_causal_lm, tiny_model
from small_game import SIZES, STORIES

PROMPTS = ["where is mary ?", "where is mary ?", "the ball is where ?"]
TEXTS = [" it is kitchen .", " it is garden", " shed"]
BATCH = pack([TokenSequence([5, 9, 14, 3, 27], 2)])[0]
Make = Callable[..., Path]


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def save_base(tmp_path: Path) -> Callable[[str], str]:
    """Saves a random model of an architecture in a folder; its name."""
    from rlhf_models import train_byte_tokenizer

    tokenizer = train_byte_tokenizer([record.story for record in load_qa(STORIES)], 400)

    def save(architecture: str) -> str:
        context = "n_positions" if architecture == "gpt2" else "max_position_embeddings"
        options = {"vocab_size": len(tokenizer), "seed": 5, "initializer_range": 0.1, context: 600}
        tiny_model(architecture, **options).save_pretrained(tmp_path / architecture)
        tokenizer.save_pretrained(tmp_path / architecture)
        return str(tmp_path / architecture)

    return save


@pytest.fixture
def base(save_base: Callable[[str], str]) -> str:
    """A Llama."""
    return save_base("llama")


@pytest.fixture
def adapter(tmp_path: Path) -> Make:
    """Saves a scorer as an adapter whose weights are far from its base's."""

    def make(name: str, base: str, *, seed: int = 0, head: Any = "linear", **settings: Any) -> Path:
        model = RewardModel.from_language_model(base, head=head, seed=seed)
        model.add_lora(LoraSettings(**{"lora_r": 3, **settings}))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(tmp_path / name)
        return tmp_path / name

    return make


@pytest.fixture
def scorers(base: str, adapter: Make) -> dict[str, Any]:
    """Settings of a game on `base` with a reward model and a judge that are adapters of it."""
    return settings(
        base, reward=adapter("reward", base, seed=1), judge=adapter("judge", base, seed=2, lora_r=2)
    )


def settings(base: str | None, *, reward: Any = None, judge: Any = None, **more: Any) -> dict[str, Any]:
    return SIZES | {
        "policy_model": {"model_name": base, "max_new_tokens": 6},
        "monitor_model": {"model_name": base, "max_new_tokens": 8},
        "reward_model": {"model_name": reward and str(reward)},
        "judge_model": {"model_name": str(judge)} if judge else {"kind": "rule"},
        **more,
    }


def altered(values: dict[str, Any], **sections: dict[str, Any]) -> MinMaxConfig:
    return MinMaxConfig.from_dict(values | {name: values[name] | s for name, s in sections.items()})


def game(config: MinMaxConfig) -> tuple[MinMaxPipeline, Stories]:
    devices, stories = DeviceManager({}), load_stories(config)
    players = load_players(config, None, devices)
    reward = ScorerLoader(config, None, devices, players).reward_model()
    judge = ScorerLoader(config, None, devices, players).judge(stories.prompts)
    return MinMaxPipeline(players, reward, judge, stories.prompts, config, w_judge=1.5), stories


def shared(scorer: Any) -> SharedScorer:
    scorer = scorer.model if isinstance(scorer, HeadJudge) else scorer
    assert isinstance(scorer, SharedScorer)
    return scorer


def adapter_parameters(pipeline: MinMaxPipeline, name: str) -> Iterator[Any]:
    """The parameters of an adapter on the players' backbone."""
    named = pipeline.players.policy.model.named_parameters()
    return (parameter for key, parameter in named if f".{name}." in key)


@pytest.mark.parametrize("architecture", [pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
@pytest.mark.parametrize("head", [pytest.param("linear", marks=pytest.mark.slow), "mlp"])
def test_scores_are_those_of_a_model_of_its_own(
    save_base: Callable[[str], str], adapter: Make, architecture: str, head: str
) -> None:
    base = save_base(architecture)
    only_some = {"lora_target_modules": ("c_attn" if architecture == "gpt2" else "q_proj",)}
    reward = adapter("reward", base, head=head, lora_dropout=0.5)
    judge = adapter("judge", base, seed=4, **only_some)
    pipeline, _ = game(MinMaxConfig.from_dict(settings(base, reward=reward, judge=judge)))
    expected = RewardModel.from_pretrained(reward).score(PROMPTS, TEXTS)
    found = pipeline.reward_model.score(PROMPTS, TEXTS)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    probability = JudgeModel.from_pretrained(judge).score(PROMPTS, TEXTS)
    model = shared(pipeline.judge)
    torch.testing.assert_close(model.score(PROMPTS, TEXTS), probability, rtol=0, atol=1e-5)
    assert float(probability.min()) > 0 and float(probability.max()) < 1
    # Packed together they score as each by itself, and as without the adapter they do not.
    alone = torch.cat([model.score([p], [t]) for p, t in zip(PROMPTS, TEXTS, strict=True)])
    torch.testing.assert_close(alone, probability, rtol=0, atol=1e-5)
    torch.testing.assert_close(model.score(PROMPTS, TEXTS, max_tokens=25), probability, rtol=0, atol=1e-5)
    assert (model.model.score(PROMPTS, TEXTS) - probability).abs().max() > 1e-3


def test_a_scorer_may_read_texts_with_their_end(base: str, adapter: Make) -> None:
    folder = adapter("reward", base)
    model = RewardModel.from_pretrained(folder)
    model.append_eos = True
    model.save_pretrained(folder)
    pipeline, _ = game(MinMaxConfig.from_dict(settings(base, reward=folder)))
    torch.testing.assert_close(pipeline.reward_model.score(PROMPTS, TEXTS), model.score(PROMPTS, TEXTS))


def test_one_backbone_and_no_copy_of_it(scorers: dict[str, Any]) -> None:
    pipeline, _ = game(MinMaxConfig.from_dict(scorers))
    players = pipeline.players
    trunk = players.policy.model.get_base_model().base_model
    for scorer, name in ((pipeline.reward_model, "reward"), (pipeline.judge, "judge")):
        model = shared(scorer).model.model
        assert model.base_model is trunk and shared(scorer).adapter == name
        frozen = [*adapter_parameters(pipeline, name), *model.score.parameters()]
        assert frozen and not any(parameter.requires_grad for parameter in frozen)
        trained = {id(p) for player in (players.policy, players.monitor) for p in player.parameters()}
        assert not trained & {id(parameter) for parameter in frozen}
    assert all(p.requires_grad for p in [*players.policy.parameters(), *players.monitor.parameters()])


def test_the_active_adapter_comes_back(scorers: dict[str, Any]) -> None:
    pipeline, stories = game(MinMaxConfig.from_dict(scorers))
    adapters, judge = pipeline.players.policy.adapters, pipeline.judge
    assert adapters is not None and adapters.active == "policy" and not isinstance(judge, Validator)
    for active in ("monitor", None):
        with adapters.use(active):
            pipeline.reward_model.score(PROMPTS, TEXTS)
            judge.score(["q"], ["a"], [None])
            assert adapters.active == active
    with raises_error("context_too_short"):
        pipeline.reward_model.score(["x " * 700], ["y"])
    assert adapters.active == "policy" and not adapters.model.training
    assert len(pipeline.answer(pipeline.players.policy, stories.train[:1], 2, seed=0)) == 2


@pytest.mark.slow
def test_players_do_not_notice_adapters_beside_theirs(scorers: dict[str, Any]) -> None:
    """Reward model and judge score by models of their own in both games, so that nothing else differs."""
    apart = altered(scorers, reward_model={"share_backbone": False}, judge_model={"share_backbone": False})
    pipeline, stories = game(apart)
    crowded, _ = game(apart)
    devices, state = DeviceManager({}), torch.get_rng_state()
    beside = MinMaxConfig.from_dict(scorers)
    reward = ScorerLoader(beside, None, devices, crowded.players).reward_model()
    ScorerLoader(beside, None, devices, crowded.players).judge(stories.prompts)
    assert torch.equal(torch.get_rng_state(), state)
    kept = [parameter.clone() for parameter in adapter_parameters(crowded, "reward")]
    rows = []
    for each in (pipeline, crowded):
        trainer = MinMaxTrainer(each, apart, stories.train)
        steps = []
        for _ in range(2):
            if each is crowded:
                reward.score(PROMPTS, TEXTS)
            steps.append({k: v for k, v in trainer.train_step().items() if not k.startswith(CLOCK)})
        rows.append(steps)
    assert rows[0] == rows[1] and "policy/loss" in rows[0][-1]
    for role in ("policy", "monitor"):
        both = (getattr(each.players, role).parameters() for each in (pipeline, crowded))
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
    after = list(adapter_parameters(crowded, "reward"))
    assert all(torch.equal(a, b) for a, b in zip(kept, after, strict=True))
    assert all(parameter.grad is None for parameter in after)
    references = [each.players.policy.ref_logps(BATCH) for each in (pipeline, crowded)]
    assert torch.equal(*references)


@pytest.mark.slow
def test_a_resumed_game_repeats_one_that_was_not_stopped(scorers: dict[str, Any], tmp_path: Path) -> None:
    config = MinMaxConfig.from_dict(scorers)

    def trainer(folder: str, *, resume: bool = False) -> MinMaxTrainer:
        pipeline, stories = game(config)
        run = RunFolder.create(tmp_path / folder, resume=resume)
        return MinMaxTrainer(pipeline, config, stories.train, run=run)

    whole = trainer("whole")
    whole.train()
    stopped = trainer("stopped")
    stopped.train_step()
    stopped.save_checkpoint()
    resumed = trainer("stopped", resume=True)
    assert resumed.resume() and resumed.step == 1
    resumed.train()
    last = [each.run.read_metrics()[-1] for each in (whole, resumed) if each.run]
    mine, its = ({k: v for k, v in row.items() if not k.startswith(CLOCK)} for row in last)
    assert mine == its
    saved = tmp_path / "whole" / "checkpoint-2" / "policy" / "adapter_model.safetensors"
    assert not any("reward" in name or "score" in name for name in load_file(saved))


@pytest.mark.slow
def test_held_out_scorers_share_as_well(scorers: dict[str, Any], base: str, adapter: Make) -> None:
    other = {"reward_model": {"model_name": str(adapter("other", base, seed=7))}}
    other["judge"] = {"model_name": str(adapter("other-judge", base, seed=8))}
    config = MinMaxConfig.from_dict(scorers | {"held_out": other})
    pipeline, stories = game(config)
    held_out = ScorerLoader(config, None, DeviceManager({}), pipeline.players).held_out(stories.prompts)
    assert shared(held_out.reward_model).adapter == "held_out_reward"
    assert shared(held_out.judge).adapter == "held_out_judge"
    adapters = pipeline.players.policy.adapters
    assert adapters and set(adapters.names) == {
        *("policy", "monitor", "reward", "judge", "held_out_reward", "held_out_judge")
    }
    expected = RewardModel.from_pretrained(other["reward_model"]["model_name"]).score(PROMPTS, TEXTS)
    torch.testing.assert_close(shared(held_out.reward_model).score(PROMPTS, TEXTS), expected)
    rows = dict(plan_run(config)["rows"])
    assert rows["held-out judge model"].endswith("other-judge: adapter on the players' backbone")


def test_each_player_may_host_scorers_of_its_own_model(
    save_base: Callable[[str], str], base: str, adapter: Make
) -> None:
    other = save_base("gpt2")
    values = settings(base, reward=adapter("reward", other), judge=adapter("judge", base))
    config = altered(values, monitor_model={"model_name": other})
    assert scorer_hosts(config, DeviceManager({})) == {"reward": "monitor", "judge": "policy"}
    pipeline, _ = game(config)
    assert shared(pipeline.reward_model).adapters is pipeline.players.monitor.adapters
    assert shared(pipeline.judge).adapters is pipeline.players.policy.adapters
    rows = dict(plan_run(config)["rows"])
    assert (
        rows["reward model"]
        == f"gpt2, {values['reward_model']['model_name']}: adapter on the monitor's backbone"
    )


def test_without_being_asked_it_shares_where_it_can(scorers: dict[str, Any], base: str) -> None:
    def hosts(config: MinMaxConfig) -> set[str]:
        return set(scorer_hosts(config, DeviceManager({})))

    full = {"use_lora": False}
    assert hosts(MinMaxConfig.from_dict(scorers)) == {"reward", "judge"}
    assert hosts(altered(scorers, reward_model={"share_backbone": False})) == {"judge"}
    assert hosts(altered(scorers, policy_model=full, monitor_model=full)) == set()
    assert hosts(altered(scorers, reward_model={"model_name": base})) == {"judge"}
    assert hosts(altered(scorers, reward_model={"load_in_8bit": True})) == {"judge"}
    eight = {"load_in_8bit": True}
    quantised = altered(scorers, policy_model=eight, judge_model=eight)
    assert hosts(quantised) == {"judge"}
    demanded = altered(scorers, policy_model=eight, reward_model={"share_backbone": True})
    assert hosts(demanded) == {"reward"}


def test_the_base_may_be_written_otherwise(scorers: dict[str, Any], base: str) -> None:
    relative = {"model_name": f"./{Path(base).name}"}
    config = altered(scorers, policy_model=relative, monitor_model=relative)
    assert set(scorer_hosts(config, DeviceManager({}))) == {"reward", "judge"}


class Apart(DeviceManager):
    """Pretends that the reward model has a GPU."""

    def device(self, role: str) -> torch.device:
        return torch.device("cuda:1" if role == "reward" else "cpu")


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("reward_model", {"model_name": None}, "built from the training rows is a full model"),
        ("reward_model", {"model_name": "llama"}, "llama is a full model; train an adapter"),
        ("policy_model", {"model_name": "other"}, "its base is .*/llama and the policy is other; give"),
        ("policy_model", {"use_lora": False}, "the policy trains all its weights; set policy_model.use_lora"),
        ("reward_model", {"model_name": "headless"}, "headless brings no score head"),
        ("reward_model", {"load_in_8bit": True}, "it and the policy are quantised differently"),
        ("devices", {}, "it is sent to cuda:1 and the policy to cpu; set both to one device"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_a_reason(
    scorers: dict[str, Any], section: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    headless = tmp_path / "headless"
    headless.mkdir()
    for file in (tmp_path / "reward").iterdir():
        (headless / file.name).write_bytes(file.read_bytes())
    tensors = load_file(headless / "adapter_model.safetensors")
    bare = {name: tensor for name, tensor in tensors.items() if ".score." not in name}
    save_file(bare, headless / "adapter_model.safetensors")

    scorers["reward_model"]["share_backbone"] = True
    devices = Apart({}) if section == "devices" else DeviceManager({})
    sections = {section: values}
    if section == "policy_model":
        sections["monitor_model"] = values
    config = altered(scorers | {"devices": {}}, **sections)
    with pytest.raises(UserError, match=rf"^the reward model cannot share the players' backbone.*{message}"):
        scorer_hosts(config, devices)


def test_a_head_or_layers_of_another_shape_are_refused(scorers: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "reward" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if ".score." in name)
    save_file(tensors | {name: torch.zeros(2, 32)}, path)
    with raises_error("head_does_not_fit"):
        game(MinMaxConfig.from_dict(scorers))
    name = next(name for name in tensors if "lora_A" in name)
    save_file(tensors | {name: torch.zeros(3, 31)}, path)
    with raises_error("adapter_does_not_fit"):
        game(MinMaxConfig.from_dict(scorers))


@pytest.mark.parametrize("kind", ["rule", "prompted", "api"])
def test_only_heads_share(kind: str) -> None:
    judge = {"kind": kind, "share_backbone": True}
    judge |= {"rule": {}, "prompted": {"model_name": "m"}}.get(kind, {"model_name": "m", "base_url": "u"})
    with pytest.raises(UserError, match=f"a judge of kind {kind} has no share_backbone"):
        MinMaxConfig.from_dict({"judge_model": judge})


def test_an_adapter_with_its_own_backbone_is_a_scorer_too(
    scorers: dict[str, Any], save_base: Callable[[str], str]
) -> None:
    other = {"model_name": save_base("qwen2")}
    config = altered(scorers, policy_model=other, monitor_model=other)
    checked = check_run(config, load_stories(config), DeviceManager({}))
    assert checked.hosts == {} and checked.models["reward"].config.model_type == "llama"
    pipeline, _ = game(config)
    expected = RewardModel.from_pretrained(scorers["reward_model"]["model_name"]).score(PROMPTS, TEXTS)
    assert torch.equal(pipeline.reward_model.score(PROMPTS, TEXTS), expected)
    rows = dict(plan_run(config)["rows"])
    assert rows["reward model"].endswith("/reward: adapter on its own backbone")


def test_a_dry_run_counts_only_the_adapters(scorers: dict[str, Any], tmp_path: Path) -> None:
    """Shared: 4 bytes for each value in the adapter's file. Apart: the same, and a classifier's fp32 weights.

    The classifier is the language model with one row of 32 for the score in place of the LM head.
    """
    from rlhf_minmax.run.checks import inspect_models
    from rlhf_minmax.run.memory import estimate_memory

    def weights(config: MinMaxConfig) -> float:
        models = inspect_models(config, load_stories(config))
        planned = estimate_memory(config, models, DeviceManager(num_gpus=0), pass_tokens=0, cache_tokens=0)
        (memory,) = planned.values()
        return memory["load"]["weights"] - memory["update"]["moments"] / 2  # without what players train

    tensors = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("reward", "judge")]
    sizes = [4 * sum(tensor.numel() for tensor in each.values()) for each in tensors]
    model = load_causal_lm(scorers["policy_model"]["model_name"])
    players = 4 * sum(p.numel() for p in model.parameters())
    trunk = 4 * (sum(p.numel() for p in model.base_model.parameters()) + 32)
    assert weights(MinMaxConfig.from_dict(scorers)) == players + sum(sizes)
    apart = altered(scorers, reward_model={"share_backbone": False})
    assert weights(apart) == players + sum(sizes) + trunk
    rows = dict(plan_run(MinMaxConfig.from_dict(scorers))["rows"])
    folder = scorers["reward_model"]["model_name"]
    assert rows["reward model"] == f"llama, {folder}: adapter on the players' backbone"
