"""Damaged checkpoints, models, merges and stages: refused by name or made up for, never used in silence."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pipeline_kills

from torture_trials.commands import Ended
from torture_trials.kills import pipeline_seconds
from torture_trials.place import (
    MERGES,
    METHODS,
    Place,
    cleared,
    folder_differences,
    run_differences,
    wait_until,
)
from torture_trials.trial import Trial, judged

HOWS = ("cut", "emptied", "deleted", "flipped")


def damage(path: Path, rng: random.Random, hows: tuple[str, ...] = HOWS) -> str:
    """Damage a file; what was done to it."""
    how, data = rng.choice(hows), path.read_bytes()
    match how:
        case "deleted":
            path.unlink()
        case "emptied":
            path.write_bytes(b"")
        case "cut":
            path.write_bytes(data[: rng.randrange(len(data))] if data else b"")
        case _:
            changed = bytearray(data or b"?")
            for _ in range(rng.choice((1, 1, 8))):
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            path.write_bytes(changed)
    return f"{path.name} {how}"


def drawn(folder: Path, rng: random.Random, pattern: str = "*") -> Path:
    """A file of a folder or below it."""
    return rng.choice(sorted(path for path in folder.rglob(pattern) if path.is_file()))


def unnamed(end: Ended, path: Path, folder: Path) -> list[str]:
    """A refusal that names neither the file nor a folder of it."""
    names = {path.name, *(parent.name for parent in path.relative_to(folder).parents if parent.name)}
    named = end.code != 2 or any(name in end.said for name in names)
    return [] if named else [f"{path.name} is not named: {end.said[-300:]}"]


def half_run(place: Place, method: str) -> Path:
    """A copy of a run that was killed after step 7 of 10, with the checkpoints of steps 4 and 6."""
    kept = place.folder / f"half-{method}"
    if not kept.exists():
        started = place.commands.start(place.training(method, kept))
        metrics = kept / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 7, started)
        started.kill()
        started.ended()
    copy = place.new("run")
    shutil.copytree(kept, copy)
    return copy


def damaged_run(place: Place, rng: random.Random) -> Trial:
    """A file of an interrupted training, mostly of its newest checkpoint, is damaged; then it is resumed."""
    method = rng.choice([*METHODS])
    whole, _ = place.whole_run(method)
    run = half_run(place, method)
    newest = max(run.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    log = rng.random() < 0.3
    if log:  # what is only appended to, and the settings, can only be cut, emptied or deleted
        path = rng.choice(sorted(path for path in run.iterdir() if path.is_file()))
        what = damage(path, rng, ("cut", "emptied", "deleted"))
    else:
        path = drawn(rng.choice((newest, newest, *run.glob("checkpoint-*"))), rng)
        what = damage(path, rng)
    end = place.commands.finish(place.training(method, run))
    lost = unnamed(end, path, run) if end.code else run_differences(run, whole)
    if log:  # what a cut log has lost is lost; nothing else may be
        lost = [each for each in lost if each != f"{path.name} differs"]
    where = "log or settings" if log else "checkpoint"
    trial = judged(f"damaged {where}, --resume", [(end, (0, 2))], detail=f"{method}: {what}", lost=lost)
    cleared(run)
    return trial


def damaged_model(place: Place, rng: random.Random) -> Trial:
    """A file of a trained model is damaged; then a training starts from the model."""
    run, _ = place.whole_run("sft")
    model, out = place.new("model"), place.new("run")
    shutil.copytree(run / "final", model)

    def training(model: Path, out: Path) -> list[Any]:
        short = {"max_steps": 2, "save_steps": 2, "model_name_or_path": model}
        words = place.training("dpo", out, **short)
        at = next(i for i, word in enumerate(words) if str(word).startswith("model_config="))
        return [*words[: at - 1], *words[at + 1 :]]

    whole, _ = place.whole("dpo-from-model", lambda path: training(run / "final", path))
    # What may be edited by hand is not checked: configs are only cut, emptied and deleted.
    path = model / rng.choice(("model.safetensors", "tokenizer.json", "config.json", "tokenizer_config.json"))
    what = damage(path, rng, HOWS if path.name in ("model.safetensors", "tokenizer.json") else HOWS[:3])
    end = place.commands.finish(training(model, out))
    lost = unnamed(end, path, model.parent) if end.code else run_differences(out, whole)
    trial = judged("damaged model, --model", [(end, (0, 2))], detail=what, lost=lost)
    cleared(model, out)
    return trial


def _merge_of_copies(place: Place, method: str, copies: Path, out: Path) -> list[Any]:
    """The command that merges copies of the models."""
    base, math, code = (copies / name for name in ("base", "math", "code"))
    words = ["rlhf-merge", method.replace("_", "-"), "--base", base, "--model", math, "--model", code, out]
    return [*words, "--max-shard-size", "4MB", *(["--density", "0.5"] if "ties" in method else [])]


def damaged_merge_input(place: Place, rng: random.Random) -> Trial:
    """A file of a model is cut, emptied or deleted, or the header of its weights changed; it is merged."""
    method, copies, out = rng.choice(MERGES), place.new("models"), place.new("out")
    shutil.copytree(Path(place.models[0]).parent, copies)
    whole, _ = place.whole(
        f"plain-{method}", lambda path: _merge_of_copies(place, method, Path(place.models[0]).parent, path)
    )
    path = drawn(copies, rng)
    if rng.random() < 0.4:
        path = drawn(copies, rng, "*.safetensors")
        data = bytearray(path.read_bytes())
        data[rng.randrange(8 + int.from_bytes(data[:8], "little"))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        what = f"{path.name} with another header"
    else:
        what = damage(path, rng, ("cut", "emptied", "deleted"))
    end = place.commands.finish(_merge_of_copies(place, method, copies, out))
    names = {"tokenizer.json", "config.json"}  # which are copied, but for their own damage
    skipped = ("README.md", "merge_config.yaml", *(names & {path.name}))
    differs = folder_differences(out, whole, but=skipped) if out.exists() else []
    lost = unnamed(end, path, copies) if end.code else differs
    trial = judged(
        "damaged model, rlhf-merge", [(end, (0, 2))], detail=f"{path.parent.name}/{what}", lost=lost
    )
    cleared(copies, out)
    return trial


def damaged_merge(place: Place, rng: random.Random) -> Trial:
    """A merge is killed, a file of what it left or of a model is damaged, and it is started again."""
    method, copies, out = rng.choice(MERGES), place.new("models"), place.new("out")
    shutil.copytree(Path(place.models[0]).parent, copies)
    whole, _ = place.whole(
        f"plain-{method}", lambda path: _merge_of_copies(place, method, Path(place.models[0]).parent, path)
    )
    journal = out.parent / f".{out.name}.merging" / "journal.jsonl"
    words = [*_merge_of_copies(place, method, copies, out), "--threads", 1]
    started = place.commands.start(words)
    wanted = rng.randint(1, 10)
    wait_until(lambda: journal.exists() and journal.read_bytes().count(b"\n") >= wanted, started)
    started.kill()
    ends: list[tuple[Ended, tuple[int, ...]]] = [(started.ended(), (0, -signal.SIGKILL))]
    what, lost = "it was faster", list[str]()
    if not out.exists():
        folder = rng.choice((journal.parent, journal.parent, copies))
        path = drawn(folder, rng)
        what = f"{folder.name}/{damage(path, rng)}"
        end = place.commands.finish(words)
        ends.append((end, (0, 2)))
        if end.code:
            lost = unnamed(end, path, folder.parent)
            ends.append((place.commands.finish([*words, "--restart"]), (0, 2)))
    if out.exists() and "models" not in what:
        lost += folder_differences(out, whole, but=("README.md", "merge_config.yaml"))
    trial = judged("damaged interrupted merge", ends, detail=f"{method}: {what}", lost=lost)
    cleared(copies, out, journal.parent)
    return trial


def damaged_pipeline(place: Place, rng: random.Random) -> Trial:
    """A file of a finished pipeline is damaged; then the pipeline is run again."""
    pipeline_seconds(place)
    work = place.folder / "pipeline"
    undisturbed, root = pipeline_kills.contents(work / "whole"), place.new("pipeline")
    shutil.copytree(work / "whole", root, symlinks=True)
    named = [root / name for name in undisturbed]
    path = rng.choice(named) if rng.random() < 0.7 else drawn(root, rng)
    what = damage(path, rng)
    log = work / "pipeline.log"
    log.unlink()
    code = pipeline_kills.start(work, root).wait()
    end = Ended(code, log.read_text(), 0.0, hung=False)
    if code:
        lost = unnamed(end, path, root)
    else:
        found = pipeline_kills.contents(root)
        lost = [f"{name} differs" for name in undisturbed if found.get(name) != undisturbed[name]]
    trial = judged(
        "damaged pipeline", [(end, (0, 2))], detail=f"{path.parent.name}/{what}, exit code {code}", lost=lost
    )
    cleared(root)
    return trial
