"""Builds the models of the demonstration: a base with both roles, a reward model and a judge.

Everything is trained on the spot from question-answering records, in two or three minutes on one CPU thread
for a procedural world, and kept in the user's cache folder under a hash of the settings.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from rlhf_algos import tiny_base
from rlhf_data import (
    QARecord,
    UserError,
    atomic_folder,
    atomic_write_json,
    ensure_writable_folder,
    json_hash,
    remove_stale_temps,
)
from rlhf_data import cache_folder as default_cache
from rlhf_minmax.config.run import DemoSettings
from rlhf_minmax.demo.teachers import Progress, Teacher, answer_text
from rlhf_minmax.demo.trainings import PLANTED_GAP, DemoBuilder, one_thread
from rlhf_minmax.game.prompts import Prompts
from rlhf_models import RewardModel, load_causal_lm, load_tokenizer, train_byte_tokenizer

_NOT_BUILDING = ("prebuilt", "min_evidence_share", "min_judge_accuracy")
_OWN_GATES = "gates.json"
"""In the folder of a judge that did not learn from all records."""
STALE_S = 86400.0
"""Seconds after which what no build has touched was left by a killed one; machines may share a cache."""
RECIPE = 7
"""Incremented with every change of the recipe below, so that cached models are rebuilt."""
PREBUILT = Path(__file__).parent / "models"
"""Models of seed 0 and the default settings, which scripts/build_demo.py writes."""


@dataclass(frozen=True)
class DemoModels:
    """The folders of the built models, in Hugging Face format; a held-out reward model only if wanted."""

    base: Path
    reward: Path
    judge: Path
    held_out_reward: Path | None = None


def demo_models(
    records: Sequence[QARecord],
    prompts: Prompts,
    settings: DemoSettings,
    *,
    seed: int,
    cache_folder: Path | None = None,
    rebuild: bool = False,
    progress: Progress | None = None,
    force: bool = False,
) -> DemoModels:
    """The demonstration models for these records, from the cache or built now.

    Args:
        records: training records with their right answers; nothing else is learned from.
        prompts: how records are put to the players, with the data set's rules.
        settings: sizes and lengths.
        seed: of weights, texts and orders; part of the cache key.
        cache_folder: where built models are kept.
        rebuild: build even what is cached.
        progress: called after every training step.
        force: take models that miss their gates, see `missed_gates`.

    Raises:
        UserError: a model misses its gate, the cache folder cannot be written to, or what comes with the
            package is to be rebuilt.
    """
    if rebuild and settings.prebuilt:
        raise UserError(
            "demo.prebuilt takes the models that come with the package, which are not built anew; leave out "
            "demo.prebuilt or the rebuilding",
            code="conflicting_options",
        )
    folder = demo_folder(records, prompts, settings, seed=seed, cache_folder=cache_folder)
    if rebuild or not folder.is_dir():
        remove_stale_temps(ensure_writable_folder(folder.parent), untouched_s=STALE_S)
        tokenizer = demo_tokenizer(records, prompts, settings)

        builder = DemoBuilder(
            records,
            prompts,
            settings,
            tokenizer,
            seed=seed,
            progress=progress,
            on_gate=partial(_check_gates, settings=settings, force=force),
        )
        with atomic_folder(folder) as temporary, one_thread():
            builder.build(partial(untrained_base, tokenizer, settings), temporary)
    models = DemoModels(folder / "base", folder / "reward", folder / "judge")
    _check_gates(_gates(models), settings, force=force)
    return models


def with_judge_of(
    demo: DemoModels,
    judged: Sequence[QARecord],
    prompts: Prompts,
    settings: DemoSettings,
    *,
    seed: int,
    progress: Progress | None = None,
    force: bool = False,
) -> DemoModels:
    """The demonstration's models, the judge learned from `judged` alone; cached with them or built now.

    For a game that may not use the answers of all records; `demo` is what `demo_models` returned for the same
    prompts, settings and seed.

    Raises:
        UserError: the judge misses its gate.
    """
    folder = judge_folder(demo.base.parent, judged)
    if not folder.is_dir():
        remove_stale_temps(folder.parent, untouched_s=STALE_S)
        tokenizer = load_tokenizer(demo.base)
        builder = DemoBuilder(judged, prompts, settings, tokenizer, seed=seed, progress=progress)
        with atomic_folder(folder) as temporary, one_thread():
            judge = builder.train_judge(load_causal_lm(demo.base), settings.judge_steps)
            judge.save_pretrained(temporary)
            gates = {"judge_accuracy": builder.judge_accuracy(judge)}
            atomic_write_json(temporary / _OWN_GATES, gates)
    models = replace(demo, judge=folder)
    _check_gates(_gates(models), settings, force=force)
    return models


def judge_folder(demo: Path, judged: Sequence[QARecord]) -> Path:
    """Path of the judge that learned from these records, in a folder of demonstration models."""
    return demo / f"judge-{json_hash([record.contents() for record in judged])[:16]}"


def missed_gates(models: DemoModels, settings: DemoSettings) -> list[str]:
    """Shortcomings of built models, one sentence each; empty if they can play the game."""
    return _missed(_gates(models), settings)


def _gates(models: DemoModels) -> dict[str, float]:
    gates = json.loads((models.base.parent / "demo.json").read_text(encoding="utf-8"))["gates"]
    own = models.judge / _OWN_GATES
    return gates | (json.loads(own.read_text(encoding="utf-8")) if own.exists() else {})


def _check_gates(gates: Mapping[str, float], settings: DemoSettings, *, force: bool) -> None:
    missed = _missed(gates, settings)
    if missed and not force:
        raise UserError(f"{'; '.join(missed)}; or play all the same with --force", code="demo_too_weak")


def _missed(gates: Mapping[str, float], settings: DemoSettings) -> list[str]:
    texts = {
        "verdict_accuracy": "the base built from the rows gives the true verdict on only {value:.0%} of the "
        "training stories, shown truthful evidence (demo.min_verdict_accuracy {least:g}): a model this small "
        "cannot read them; give --model, or raise demo.pretrain_steps",
        "planted_gap": "the built reward model likes its planted flaw by only {value:.2f} standard "
        "deviations, and {least:g} are expected; choose another --seed, raise demo.reward_steps, or leave "
        "the flaw out with demo.flawed_reward=false",
        "judge_accuracy": "the judge built from the rows believes the right answer more than a wrong one on "
        "only {value:.0%} of the training stories, shown truthful critiques (demo.min_judge_accuracy "
        "{least:g}); give --judge-model, or raise demo.judge_steps",
    }
    least = {
        "verdict_accuracy": settings.least_verdict_accuracy,
        "planted_gap": PLANTED_GAP,
        "judge_accuracy": settings.least_judge_accuracy,
    }
    return [
        text.format(value=gates[name], least=least[name])
        for name, text in texts.items()
        if name in gates and gates[name] < least[name]
    ]


def build_seconds(
    records: Sequence[QARecord], prompts: Prompts, settings: DemoSettings, tokenizer: Any, *, seed: int
) -> float:
    """About how long building takes on this machine, from the time of one step of every training.

    The seconds of all steps, without the further passes of a base or reward model that misses its gate. The
    arguments are those of `demo_models`, and the tokenizer that `demo_tokenizer` returns for them.
    """
    builder = DemoBuilder(records, prompts, settings, tokenizer, seed=seed)
    base = untrained_base(tokenizer, settings, seed)
    reward = RewardModel.from_backbone(base, tokenizer, seed=seed)
    stages = (
        (settings.num_pretrain_steps, lambda: builder.pretrain(base, 1)),
        (settings.sft_steps, lambda: builder.fine_tune(base, 1)),
        (settings.reward_steps, lambda: builder.fit_reward(reward, builder.rated_pairs(1))),
        (settings.judge_steps, lambda: builder.train_judge(base, 1)),
    )
    total = 0.0
    with one_thread():
        builder.pretrain(base, 1)  # a first step pays for what later ones find ready
        for steps, step in stages:
            started = time.perf_counter()
            step()
            total += steps * (time.perf_counter() - started)
    return total


def demo_folder(
    records: Sequence[QARecord],
    prompts: Prompts,
    settings: DemoSettings,
    *,
    seed: int,
    cache_folder: Path | None = None,
) -> Path:
    """Folder of `demo_models` for these arguments, in the cache or in this package."""
    if settings.prebuilt:
        return PREBUILT
    key = json_hash(
        {
            "recipe": RECIPE,
            "settings": _what_builds(settings),
            "seed": seed,
            "prompts": prompts.fingerprint(),
            "records": [record.contents() for record in records],
        }
    )
    return (cache_folder or default_cache("demo")) / key[:24]


def _what_builds(settings: DemoSettings) -> dict[str, Any]:
    """The settings that built models depend on."""
    values = settings.to_dict() | {
        "flawed_reward": settings.flawed_reward is not False,
        "pretrain_steps": settings.num_pretrain_steps,
        "min_verdict_accuracy": settings.least_verdict_accuracy,
    }
    return {name: value for name, value in values.items() if name not in _NOT_BUILDING}


def demo_tokenizer(records: Sequence[QARecord], prompts: Prompts, settings: DemoSettings) -> Any:
    """The byte-level tokenizer of the demonstration models, trained on everything they are shown."""
    if settings.prebuilt:
        return load_tokenizer(PREBUILT / "base")
    teacher = Teacher(prompts.rules, records, random.Random(0))
    texts = []
    for record in records:
        answer = answer_text(record.answer_text)
        has_evidence = prompts.rules.correct_evidence(record) is not None
        critique = teacher.correct_critique(record, "") if has_evidence else ""
        texts.append(prompts.monitor(record, answer) + critique)
        texts += [answer_text(choice) for choice in record.choices]
    return train_byte_tokenizer([*texts, " so right", " so wrong"], settings.vocab_size)


def untrained_base(tokenizer: Any, settings: DemoSettings, seed: int) -> PreTrainedModel:
    """The base of the demonstration models as it is before its first training step."""
    sizes = {name: getattr(settings, name) for name in ("hidden_size", "num_layers", "max_positions")}
    return tiny_base(tokenizer, seed=seed, **sizes)
