"""The dry run: resolve and check everything, estimate tokens and memory, train nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from rlhf_algos import Machine, memory_rows, peak_of, shown_tokens
from rlhf_algos.process_group import world_size
from rlhf_data import (
    QARecord,
    StepTokens,
    TokenSequence,
    ensure_writable_folder,
    longest_completions,
    pack,
)
from rlhf_minmax.config.run import MinMaxConfig, PlayerConfig
from rlhf_minmax.config.scorers import JudgeConfig
from rlhf_minmax.demo.builder import demo_folder
from rlhf_minmax.game.stories import Stories, load_stories
from rlhf_minmax.players.past_players import MOST
from rlhf_minmax.players.players import share_backbone
from rlhf_minmax.run.checks import Checked, LongestText, ModelInfo, Ruler, check_run, time_to_build
from rlhf_minmax.run.distributed import check_processes, plan_devices
from rlhf_minmax.run.events import device_rows, duration
from rlhf_minmax.run.memory import GPU, Phases, check_game_fits, estimate_memory
from rlhf_minmax.scorers.loading import needs_demo
from rlhf_minmax.scorers.shared_trunk import Host
from rlhf_models import encode_completion

_RULED = {
    "rule": "a rule: reads the verdict word",
    "validator": "the data set's rules: check whether a critique refutes its answer",
}
"""The dry run's descriptions of judges without a model."""
_Sampled = tuple[list[list[int]], int, PlayerConfig]
"""A player's prompts, completions of each, and settings."""
_ASKED_IN_EVALUATION = 3
"""Requests per held-out story: the policy's answer, and a made-up one with a critique and without."""
_ASKED_OF_PROBE = 5
"""Requests per probe story: one for the score's scale, four for the break-even check."""
_ASKED_OF_RESPONSE = 4
"""Requests per held-out story of both best-response probes: before and after each."""
_CHARACTERS_PER_TOKEN = 4
"""For English text in the tokenizers of APIs, by the rule of thumb that their vendors state."""


def plan_run(config: MinMaxConfig, machine: Machine | None = None) -> dict[str, Any]:
    """Resolve and check a run without training it; its plan, with estimated tokens and memory.

    Loads the data and the tokenizers, never weights. Tokens are those of one step's real prefix trees, with
    completions of `max_new_tokens`, so they are an upper bound; memory as `estimate_memory` says.

    Args:
        config: the run's settings.
        machine: what it is planned for; None is this machine with the processes that torchrun started.

    Returns:
        `device_plan` (rows of role, device, dtype, reason), `rows` (pairs of label and text), `warnings`, and
        `memory`, bytes of each process by device, phase and part.

    Raises:
        UserError: data, devices, models, texts or the cache folder cannot be used, or the machine cannot
            hold the run.
    """
    machine = machine or Machine(world_size())
    stories = load_stories(config)
    check_processes(config, machine.processes)
    devices = plan_devices(config, machine)
    checked = check_run(config, stories, devices)
    stories = checked.stories
    ruler = Ruler(config, stories, checked.models)
    streams = step_tokens(config, stories, ruler)
    sampled = _sampled(config, stories, ruler)
    tokens = cache(lambda processes: _held_tokens(config, checked, sampled, processes))

    def estimate(config: MinMaxConfig, machine: Machine) -> dict[torch.device, Phases]:
        passed, cached = tokens(machine.processes)
        sizes = {"pass_tokens": passed, "cache_tokens": cached}
        return estimate_memory(config, checked.models, devices, machine, **sizes)

    def needs(other: MinMaxConfig, machine: Machine) -> float:
        found = estimate(other, machine)
        return peak_of(found[GPU if machine.card else devices.device("policy")])

    check_game_fits(config, needs, machine)
    memory = estimate(config, machine)
    rows = [
        ("method", "minmax, trained by this engine"),
        *_model_rows(config, stories, checked),
        *_size_rows(config, stories),
        *_token_rows(config, stories, streams),
        *_request_rows(config, stories),
        *(_length_row(text) for text in checked.longest),
        *_memory_rows(memory, machine),
        _rate_row(config),
        (
            "first prompt",
            shown_tokens(checked.models["policy"].tokenizer, ruler.policy_prompt(stories.train[0])),
        ),
    ]
    return {
        "device_plan": device_rows(devices),
        "rows": rows,
        "warnings": checked.warnings,
        "memory": {str(device): phases for device, phases in memory.items()},
    }


def _held_tokens(
    config: MinMaxConfig, checked: Checked, sampled: Mapping[str, _Sampled], processes: int
) -> tuple[int, int]:
    """Tokens of the largest pass of any process, and of its largest generation."""
    largest = 0
    for prompts, count, player in sampled.values():
        completed = _completed(prompts, count, player)
        for own in range(processes):
            first, last = (len(completed) * (own + n) // processes for n in (0, 1))
            if part := completed[first:last]:
                packed = pack(part, config.training.max_tokens_per_batch)
                largest = max(largest, *(batch.num_tokens for batch in packed))
    return largest, _cache_tokens(config, checked.stories, checked.longest, processes)


def _memory_rows(memory: dict[torch.device, Phases], machine: Machine) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for device, phases in memory.items():
        beside = replace(machine, card=None) if device != GPU else machine
        rows += memory_rows(phases, beside, str(device))
    return rows


def step_tokens(config: MinMaxConfig, stories: Stories, ruler: Ruler) -> dict[str, StepTokens]:
    """Tokens of one update of `policy` and of `monitor` on the first batch of stories."""
    found = {}
    for role, (prompts, count, player) in _sampled(config, stories, ruler).items():
        sampled = _completed(prompts, count, player)
        found[role] = StepTokens.of(pack(sampled, config.training.max_tokens_per_batch), sampled)
    return found


def _completed(prompts: list[list[int]], count: int, player: PlayerConfig) -> list[TokenSequence]:
    """`count` completions of each prompt, of the maximum length."""
    return [each for ids in prompts for each in longest_completions(ids, count, player.max_new_tokens)]


def _sampled(config: MinMaxConfig, stories: Stories, ruler: Ruler) -> dict[str, _Sampled]:
    """Prompts, completions per prompt and settings of both players, for the first batch of stories."""
    batch = stories.train[: config.training.batch_size]
    num_made_up = _num_made_up(config, stories)
    criticised = [
        prompt
        for n, record in enumerate(batch)
        for prompt in _monitor_prompts(config, ruler, record, made_up=n < num_made_up)
    ]
    return {
        "policy": (list(map(ruler.policy_prompt, batch)), config.game.num_generations, config.policy_model),
        "monitor": (criticised, config.game.num_critiques, config.monitor_model),
    }


def _monitor_prompts(
    config: MinMaxConfig, ruler: Ruler, record: QARecord, *, made_up: bool
) -> list[list[int]]:
    """The monitor's prompts about one sampled answer to a story, and about a made-up one, if any."""
    prompts = [ruler.monitor_prompt(record, [0] * config.policy_model.max_new_tokens)]
    if made_up:
        answer = ruler.stories.prompts.made_up(record.choices[record.answer or 0])
        ids = encode_completion(ruler.models["monitor"].tokenizer, answer)
        prompts.append(ruler.monitor_prompt(record, ids))
    return prompts


def _step_size(config: MinMaxConfig, stories: Stories) -> int:
    return min(config.training.batch_size, len(stories.train))


def _num_made_up(config: MinMaxConfig, stories: Stories) -> int:
    size = _step_size(config, stories)
    return min(round(config.game.tampered_fraction * size), size)


def _num_critiques(config: MinMaxConfig, stories: Stories) -> tuple[int, int]:
    """Critiques per step that train the monitor, and fresh ones in the policy's reward."""
    game, size = config.game, _step_size(config, stories)
    learned_from = (size + _num_made_up(config, stories)) * game.num_critiques
    return learned_from, size * game.num_generations * game.policy_critiques


def _num_exploited(config: MinMaxConfig, stories: Stories) -> int:
    """Held-out stories on which every evaluation measures exploitability."""
    return min(config.diagnostics.exploitability_stories, len(stories.held_out))


def _num_evaluations(config: MinMaxConfig, stories: Stories) -> int:
    """Evaluations at the start, at the end, of the plain policy, and during training."""
    training = config.training
    steps = training.num_steps(len(stories.train))
    return 2 + config.baseline + steps // (training.eval_steps or steps + 1)


def _cache_tokens(
    config: MinMaxConfig, stories: Stories, longest: list[LongestText], processes: int = 1
) -> int:
    """Prompt and completion tokens that the largest generation of a process holds at a time."""
    text = max(found.tokens for found in longest if found.role in ("policy", "monitor"))
    game, size = config.game, _step_size(config, stories)
    samples = (
        size * game.num_generations,
        (size + _num_made_up(config, stories)) * game.num_critiques,
        size * game.num_generations * game.policy_critiques,
        _num_exploited(config, stories) * game.num_generations * game.num_critiques,
        len(stories.held_out),
        config.data.probe_stories,
    )
    return min(math.ceil(max(samples) / processes) * text, config.training.max_kv_tokens)


def _model_rows(config: MinMaxConfig, stories: Stories, checked: Checked) -> list[tuple[str, str]]:
    rows = [
        (
            f"{role} model",
            f"{info.config.model_type}, {info.name or 'built from the training rows'}"
            + _where(config, info, checked.hosts.get(role)),
        )
        for role, info in checked.models.items()
    ]
    rows += [
        (role, _RULED.get(judge.kind) or f"{judge.model_name} at {judge.base_url}")
        for role, judge in _judges(config).items()
        if judge.kind in (*_RULED, "api")
    ]
    if needs_demo(config):
        folder = demo_folder(stories.building, stories.prompts, config.demo_settings(), seed=config.seed)
        if not folder.is_dir():
            ensure_writable_folder(folder.parent)
        seconds = time_to_build(config, checked)
        building = "" if seconds is None else f"to be built first, in {duration(seconds)}"
        rows.append(("built models", building or f"cached in {folder}"))
    return rows


def _where(config: MinMaxConfig, info: ModelInfo, host: Host | None) -> str:
    """The backbone of a scorer that is an adapter, as text."""
    if host is not None:
        owners = "players'" if share_backbone(config) else f"{host}'s"
        return f": adapter on the {owners} backbone"
    return ": adapter on its own backbone" if info.adapter is not None else ""


def _size_rows(config: MinMaxConfig, stories: Stories) -> list[tuple[str, str]]:
    training, game, size = config.training, config.game, _step_size(config, stories)
    train, held_out = len(stories.train), len(stories.held_out)
    steps = training.num_steps(train)
    plain = f" after {training.num_steps(train, adversary=False)} of plain RLHF" if config.baseline else ""
    learned_from, fresh = _num_critiques(config, stories)
    source = config.data.train_data or f"the world of {config.data.world}"
    skipped = f", {len(stories.skipped):,} bad ones left out" if stories.skipped else ""
    return [
        ("data", f"{source}: {train:,} rows for training, {held_out:,} held out{skipped}"),
        ("labels", _labels(stories)),
        (
            "steps",
            f"{steps:,} of {size} stories ({steps / training.num_steps_per_epoch(train):.2g} epochs){plain}",
        ),
        ("answers per step", f"{size * game.num_generations:,}"),
        ("critiques per step", f"{learned_from:,} that train the monitor, {fresh:,} in the policy's reward"),
    ]


def _labels(stories: Stories) -> str:
    """How many training stories have their right answer, and what the game does without."""
    count, labelled = len(stories.train), len(stories.labelled)
    if labelled == count:
        return f"all {count:,} training stories"
    hidden = f", data.label_share {stories.label_share:g}" if stories.label_share < 1 else ""
    return (
        f"{labelled:,} of {count:,} training stories ({labelled / count:.2g} of them{hidden}); made-up "
        "answers are of those alone, so critiques are fewer"
    )


def _token_rows(
    config: MinMaxConfig, stories: Stories, streams: dict[str, StepTokens]
) -> list[tuple[str, str]]:
    training, count = config.training, len(stories.train)
    policy, once = streams["policy"].packed * training.policy_updates, streams["monitor"].packed
    updates = training.monitor_updates_per_policy
    monitor = once * updates
    steps, learning = training.num_steps(count), training.num_steps(count, adversary=False)
    probes = _num_probes(config, steps) * (once * max(1, updates) + policy)
    total = steps * monitor + learning * policy + probes
    total += learning * policy if config.baseline else 0
    return [
        *((f"{role} tokens per update", str(stream)) for role, stream in streams.items()),
        ("tokens per step", f"at most {policy + monitor:,} in all updates"),
        *([("tokens of best-response probes", f"at most {probes:,}")] if probes else []),
        ("tokens in all", f"at most {total:,}"),
        *_exploitability_row(config, stories),
    ]


def _num_probes(config: MinMaxConfig, steps: int) -> int:
    """Rounds of best-response probes of each player: of the last players, and of the past ones kept."""
    return config.diagnostics.best_response_updates * (1 + _num_past(config, steps))


def _num_past(config: MinMaxConfig, steps: int) -> int:
    every = config.diagnostics.cross_play_steps
    return min(MOST, steps // every) if every else 0


def _exploitability_row(config: MinMaxConfig, stories: Stories) -> list[tuple[str, str]]:
    """Extra samples for exploitability."""
    answers = _num_exploited(config, stories) * config.game.num_generations
    critiques = answers * config.game.num_critiques
    evaluations = _num_evaluations(config, stories)
    text = f"{answers:,} answers and {critiques:,} critiques in each of {evaluations:,} evaluations"
    return [("exploitability", text)] if answers else []


def _judges(config: MinMaxConfig) -> dict[str, JudgeConfig]:
    held_out = config.held_out.judge
    return {"judge": config.judge_model} | ({"held-out judge": held_out} if held_out else {})


def _request_rows(config: MinMaxConfig, stories: Stories) -> list[tuple[str, str]]:
    """Requests to judges behind an API, if no text came twice."""
    training, game = config.training, config.game
    count, held_out = len(stories.train), len(stories.held_out)
    steps, learning = training.num_steps(count), training.num_steps(count, adversary=False)
    critiques, fresh = _num_critiques(config, stories)
    scored = critiques + critiques // game.num_critiques  # answers without a critique, too
    evaluations = _num_evaluations(config, stories)
    evaluated, probed = evaluations * held_out, min(config.data.probe_stories, count)
    exploited = _num_exploited(config, stories) * game.num_generations * game.num_critiques
    besides = _ASKED_IN_EVALUATION * evaluated + _ASKED_OF_PROBE * probed + evaluations * exploited
    past = _num_past(config, steps)
    if rounds := config.diagnostics.best_response_updates:
        besides += (1 + past) * (rounds * (critiques + fresh) + _ASKED_OF_RESPONSE * held_out)
    besides += past**2 * held_out
    requests = {
        "judge": (scored + fresh, steps * scored + learning * fresh + besides),
        "held-out judge": (0, evaluated + probed),
    }
    return [
        (
            f"{role} requests",
            f"about {requests[role][0]:,} per step, {requests[role][1]:,} in all"
            + _cost(judge, config, stories, requests[role][1]),
        )
        for role, judge in _judges(config).items()
        if judge.kind == "api"
    ]


def _cost(judge: JudgeConfig, config: MinMaxConfig, stories: Stories, requests: int) -> str:
    """Cost of API requests with completions of `max_new_tokens`; empty without prices."""
    questions = sum(len(record.question) for record in stories.train) / len(stories.train)
    prompt = (len(judge.question_template) + questions) / _CHARACTERS_PER_TOKEN
    prompt += config.policy_model.max_new_tokens + config.monitor_model.max_new_tokens
    cost = judge.cost(requests * prompt, requests * judge.reply_tokens)
    return "" if cost is None else f", for about {cost:.3g} (in the currency of the prices)"


def _length_row(text: LongestText) -> tuple[str, str]:
    limit = "no limit" if text.context is None else f"limit {text.context:,}"
    return f"longest {text.role} sequence", f"{text.tokens:,} tokens, {limit} ({text.story!r})"


def _rate_row(config: MinMaxConfig) -> tuple[str, str]:
    training = config.training
    rates = {"policy": config.policy_model, "monitor": config.monitor_model}
    shown = ", ".join(
        f"{role} {getattr(training, f'{role}_learning_rate'):g}, {player.lr_scheduler_type}"
        for role, player in rates.items()
    )
    scales = f"{training.time_scale_ratio:.2g} : 1 (rate x updates)"
    return "learning rates", f"{shown}; time scales, monitor : policy, {scales}"
