"""How well a small model of natural language inference finds facts that were negated or altered.

    uv run benchmarks/nli_flaws.py

Trains an encoder from scratch on pairs of sentences, with labels by rule, and plants flaws in retellings of
held-out texts: of stories, one sentence is negated (`mary did not go to kitchen .`); of reports, in which
everybody is in one place, one person is put elsewhere. Prints a JSON line: the AUROC of each measure of
consistency for planted flaws against the same retellings without them, the share of both that is flagged,
and the accuracy on pairs of sentences of held-out texts.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from rlhf_data import ReportWorldConfig, StoryWorldConfig, generate_reports, generate_stories
from rlhf_eval import auroc
from rlhf_eval.validation import AdversarialValidator, NLIModel
from rlhf_eval.validation.flaws import sentences

LABELS = ("entailment", "neutral", "contradiction")
_SAID = re.compile(r"(\w+) (went|moved|says|is) (.+) \.")
_NEGATED = {"went": "did not go", "moved": "did not move", "says": "did not say", "is": "is not"}
_BATCH = 128


def main() -> None:
    """Parse the options, train, measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1500, help="of training")
    parser.add_argument("--rows", type=int, default=100, help="held-out texts of each kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder), options.steps, options.seed)
        nli = NLIModel.from_pretrained(folder)
        print(json.dumps(measure(nli, options.rows, options.seed)))


def texts(rows: int, split: Any, seed: int) -> dict[str, list[str]]:
    """Stories and reports."""
    return {
        "stories": [
            each.story for each in generate_stories(StoryWorldConfig(), rows, split=split, seed=seed)
        ],
        "reports": [
            each.story for each in generate_reports(ReportWorldConfig(), rows, split=split, seed=seed)
        ],
    }


def negated(sentence: str) -> str:
    """The sentence that says that it is not so."""
    return _SAID.sub(lambda said: f"{said[1]} {_NEGATED[said[2]]} {said[3]} .", sentence)


def elsewhere(sentence: str, rng: random.Random) -> str:
    """The sentence of a report with another place."""
    *rest, place, stop = sentence.split()
    return " ".join(
        [*rest, rng.choice([each for each in ("attic", "cellar", "hall", "shed") if each != place]), stop]
    )


def pairs(seed: int, split: Any = "train") -> Iterator[tuple[str, str, int]]:
    """Premise, hypothesis and label, without end: of two sentences of a text, or one and its opposite."""
    rng = random.Random(seed)
    given = texts(500, split, seed)
    while True:
        kind = rng.choice(list(given))
        said = sentences(rng.choice(given[kind]))
        premise, other = rng.choice(said), rng.choice([*said, *sentences(rng.choice(given[kind]))])
        label = rng.choice(LABELS)
        if label == "neutral":
            hypothesis = rng.choice((other, negated(other)))
            if hypothesis in (premise, negated(premise)):
                continue
            if kind == "reports" and other.split()[0] == premise.split()[0]:  # of one person both places
                continue
        elif label == "entailment":
            hypothesis = premise
        else:
            hypothesis = (
                elsewhere(premise, rng) if kind == "reports" and rng.random() < 0.5 else negated(premise)
            )
        yield premise, hypothesis, LABELS.index(label)


def train(folder: Path, steps: int, seed: int) -> None:
    """Write a classifier of pairs of sentences, and its tokenizer."""
    torch.manual_seed(seed)
    stream = pairs(seed)
    tokenizer = word_tokenizer(
        f"{premise} {hypothesis}" for premise, hypothesis, _ in (next(stream) for _ in range(5000))
    )
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        id2label=dict(enumerate(LABELS)),
        label2id={label: place for place, label in enumerate(LABELS)},
    )
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    for _ in range(steps):
        premises, hypotheses, labels = map(list, zip(*(next(stream) for _ in range(_BATCH)), strict=True))
        batch = tokenizer(premises, hypotheses, padding=True, return_tensors="pt")
        model(**batch, labels=torch.tensor(labels)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def word_tokenizer(lines: Iterator[str]) -> Any:
    """A tokenizer of whole words, which joins pairs as BERT does."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = sorted({word for line in lines for word in line.split()})
    vocabulary = {word: place for place, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=32,
        **{f"{name.lower().strip('[]')}_token": name for name in special},
    )


def measure(nli: NLIModel, rows: int, seed: int) -> dict[str, Any]:
    """Flaws planted in retellings of held-out texts, and the accuracy on held-out pairs."""
    rng = random.Random(seed + 1)
    held_out = texts(rows, "eval", seed)
    plants: dict[str, tuple[str, Callable[[str, random.Random], str]]] = {
        "a fact negated": ("stories", lambda sentence, rng: negated(sentence)),
        "a place altered": ("reports", elsewhere),
    }
    found: dict[str, Any] = {"held_out_pairs": _accuracy(nli, seed + 2)}
    for name, (kind, plant) in plants.items():
        sources = held_out[kind]
        clean, flawed = [], []
        for source in sources:
            said = list(dict.fromkeys(sentences(source)))
            told = rng.sample(said, min(len(said), rng.randint(2, 4)))
            place = rng.randrange(len(told))
            clean.append(" ".join(told))
            flawed.append(" ".join([*told[:place], plant(told[place], rng), *told[place + 1 :]]))
        validator = AdversarialValidator(infers=nli)
        before, after = (validator.validate([""] * rows, each, sources) for each in (clean, flawed))
        labels = [False] * rows + [True] * rows
        scores = {
            sign + measure: [
                (-1 if sign else 1) * (each.measures[measure] or 0.0) for each in (*before, *after)
            ]
            for sign, measure in (("", "contradiction"), ("1 - ", "entailment"))
        }
        flagged = [
            round(
                float(np.mean([any(flaw.kind == "contradiction" for flaw in each.flaws) for each in side])), 3
            )
            for side in (before, after)
        ]
        found[name] = {
            "rows": rows,
            "auroc": {measure: round(auroc(values, labels), 3) for measure, values in scores.items()},
            "flagged_clean": flagged[0],
            "flagged": flagged[1],
        }
    return found


def _accuracy(nli: NLIModel, seed: int, count: int = 1000) -> dict[str, Any]:
    """The share of pairs of held-out sentences whose entailment and contradiction are both right at .5."""
    stream = pairs(seed, "eval")
    premises, hypotheses, labels = map(list, zip(*(next(stream) for _ in range(count)), strict=True))
    said = nli(premises, hypotheses) >= 0.5
    right = [
        bool(e == (label == 0) and c == (label == 2)) for (e, c), label in zip(said, labels, strict=True)
    ]
    return {"pairs": count, "accuracy": round(float(np.mean(right)), 3)}


if __name__ == "__main__":
    main()
