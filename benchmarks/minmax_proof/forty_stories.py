"""Text that nobody made for the game: forty short stories by hand, with sentences as choices.

    uv run python benchmarks/minmax_proof/forty_stories.py \
        --output benchmarks/results/minmax_forty_stories.json

`forty_stories.jsonl` has a story of five sentences, a question, four sentences as choices, and the sentence
that shows the right one.  Each seed draws 28 stories for training and 12 that are held out.  Players are
../shared/data/stories260k, really pretrained on little stories; the reward model is fine-tuned from it on
real preference pairs (hh-rlhf, 100 steps); critiques are judged by their verdicts (`judge_model.kind: rule`).

- `unmarked`: built models, as without any model of one's own, and no column of evidence.
- `as_it_is`: the pretrained model plays as it is.
- `fine_tuned`: it first learns answers and critiques of the training stories (`rlhf-train sft`), then plays.

Prints JSON: how each game starts and ends or why it does not run, and the share of questions for which the
model that it starts from finds the right choice the likeliest of four (log-probability per token; .25 by
chance) on training and held-out stories.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from cells import arms_parser, play_arms, publish, summary
from default_run import run

from rlhf_data import QARecord, TokenSequence, pack
from rlhf_minmax import MinMaxConfig, Stories, load_stories
from rlhf_models import encode_completion, encode_prompt, load_causal_lm, load_tokenizer, token_logps

ROWS = Path(__file__).with_suffix(".jsonl")
SHARED = Path(__file__).parents[3] / "shared" / "data"
MODEL = SHARED / "stories260k"
PAIRS = SHARED / "hh-rlhf" / "harmless-base-1500.jsonl.gz"
ARMS = ("fine_tuned", "as_it_is", "unmarked")
_TRAINED = 28
_LENGTHS = ["--set=policy_model.max_new_tokens=32", "--set=monitor_model.max_new_tokens=48"]
_GAME = [*_LENGTHS, "--epochs=16", "--no-baseline"]
_MARKED = "--set=data.columns.evidence_column=evidence"


def play(seed: int, arm: str, work: Path) -> dict[str, Any]:
    """One game; see `cells.play_cells`."""
    folder = work / str(seed)
    rows, held_out = split(seed, folder)
    data = [f"--train-data={rows}", f"--eval-data={held_out}", f"--seed={seed}", *_GAME]
    if arm == "unmarked":
        return run(data, folder / arm, work)
    data.append(_MARKED)
    reward, model = folder / "reward", MODEL
    files: dict[str, Any] = {"train_data": str(rows), "eval_data": str(held_out)}
    files["columns"] = {"evidence_column": "evidence"}
    stories = load_stories(MinMaxConfig.from_dict({"data": files}))
    if not (reward / "final").exists():
        train_reward(reward, seed)
    if arm == "fine_tuned":
        fine_tune(stories, folder / "sft", seed)
        model = folder / "sft" / "final"
    models = [f"--model={model}", f"--reward-model={reward / 'final'}", "--set=judge_model.kind=rule"]
    found = run([*data, *models], folder / arm, work)
    return found | likeliest(stories, model)


def split(seed: int, folder: Path) -> tuple[Path, Path]:
    """Files of the training and the held-out rows of a seed."""
    rows = ROWS.read_text(encoding="utf-8").splitlines(keepends=True)
    random.Random(seed).shuffle(rows)
    folder.mkdir(parents=True, exist_ok=True)
    parts = folder / "train.jsonl", folder / "held_out.jsonl"
    for path, part in zip(parts, (rows[:_TRAINED], rows[_TRAINED:]), strict=True):
        path.write_text("".join(part), encoding="utf-8")
    return parts


def train_reward(folder: Path, seed: int) -> None:
    """A reward model of real preferences."""
    words = [f"--train-data={PAIRS}", "--on-bad-row=skip", f"--seed={seed}", "--max-steps=100"]
    train("reward", folder, *words)


def fine_tune(stories: Stories, folder: Path, seed: int) -> None:
    """Right answers to the training stories, and true critiques of all four choices."""
    rows = []
    for record in stories.train:
        prompts, right = stories.prompts, record.answer_text
        rows.append({"prompt": prompts.policy(record), "completion": prompts.made_up(right)})
        for choice in record.choices:
            verdict = "right" if choice == right else "wrong"
            critique = f" {record.evidence} so {verdict}"
            rows.append({"prompt": prompts.monitor(record, prompts.made_up(choice)), "completion": critique})
    path = folder.with_suffix(".jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = [f"--train-data={path}", f"--eval-data={path}", f"--seed={seed}"]
    train("sft", folder, *words, "--epochs=15", "--set=learning_rate=1e-3")


def likeliest(stories: Stories, model: Path) -> dict[str, float]:
    """Share of questions whose right choice is the likeliest, by the model that a game starts from."""
    language_model, tokenizer = load_causal_lm(str(model)), load_tokenizer(str(model))
    found = {}
    for name, records in (("train", stories.train), ("held_out", stories.held_out)):
        right = [_choice(language_model, tokenizer, stories, record) == record.answer for record in records]
        found[f"likeliest_{name}"] = sum(right) / len(right)
    return found


@torch.no_grad()
def _choice(model: Any, tokenizer: Any, stories: Stories, record: QARecord) -> int:
    start = encode_prompt(tokenizer, stories.prompts.policy(record))
    ends = [encode_completion(tokenizer, stories.prompts.made_up(choice)) for choice in record.choices]
    [batch] = pack([TokenSequence([*start, *end], len(start)) for end in ends], 100_000)
    totals = torch.zeros(len(ends))
    totals.index_add_(0, batch.sequence_ids[batch.score_sequence], token_logps(model, batch).logps)
    return int((totals / torch.tensor([len(end) for end in ends])).argmax())


def train(method: str, folder: Path, *words: str) -> None:
    """Run `rlhf-train` with these words, from the beginning where it was stopped before."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "rlhf_train", method, f"--model={MODEL}", f"--output-dir={folder}"]
    done = subprocess.run([*command, *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)


def main() -> None:
    """Command line."""
    options = arms_parser(__doc__, ARMS, range(481, 484), "forty_stories").parse_args()
    runs, found = play_arms(play, options, "minmax_forty_stories")
    for arm in options.arms:
        rows = [runs[seed, arm] for seed in options.seeds]
        names = dict.fromkeys(name for row in rows for name in row if name != "error")
        found[arm] = {name: summary([row.get(name) for row in rows]) for name in names}
    publish(found, options.output)


if __name__ == "__main__":
    main()
