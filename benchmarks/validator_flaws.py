"""How well flaws that were planted in people's answers are found, and how often clean answers are flagged.

    uv run benchmarks/validator_flaws.py ../shared/data/hh-rlhf/harmless-base-1500.jsonl.gz --model MODEL \
        --ordered benchmarks/stories_in_order.txt

Answers are the preferred ones of the pairs. Half of them set the thresholds of the reference model; in the
other half flaws are planted, as many of each kind as `--rows`. Prints a JSON line: the AUROC of each measure
for its flaw against the same answers without it, and the share of answers as they are with a flaw; those
that only end in the middle of a sentence, which HH-RLHF has really, are counted apart.  With `--ordered` also
how well another order is found in the texts of a file, one on each line, such as those whose kind the model
has learned.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_data import load_records
from rlhf_eval import auroc
from rlhf_eval.stats import proportion_interval
from rlhf_eval.validation import AdversarialValidator, ReferenceScorer
from rlhf_eval.validation.flaws import sentences

_ORDERS = 5
_FOREIGN = (
    "Das ist eine gute Frage, und die Antwort ist nicht ganz so einfach wie man denkt.",
    "Je ne suis pas sûr que ce soit une bonne idée, mais il y a des gens qui le font.",
    "No creo que sea una buena idea, pero hay muchas personas que lo hacen con los niños.",
    "Я не думаю, что это хорошая идея, но многие люди так делают каждый день.",
    "これは良い質問ですが、答えはそれほど簡単ではありません。",
)


def main() -> None:
    """Parse the options, measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data")
    parser.add_argument("--model", help="reference model; without it likelihood and order are left out")
    parser.add_argument("--ordered", type=Path, help="texts, one on each line; needs a model")
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    records: Any = load_records(options.data, "preference", on_bad_row="skip")
    pairs = [(_text(record.prompt), _text(record.chosen)) for record in records.records]
    rng = random.Random(options.seed)
    rng.shuffle(pairs)
    good, rest = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
    validator = AdversarialValidator(_reference(options.model)).calibrated(
        *map(list, zip(*good, strict=True))
    )
    clean = validator.validate(*_columns(rest))
    flagged = np.array([bool(each.flaws) for each in clean], dtype=float)
    kinds: dict[str, int] = {}
    for each in clean:
        for flaw in each.flaws:
            kinds[flaw.kind] = kinds.get(flaw.kind, 0) + 1
    cut = np.array([{flaw.kind for flaw in each.flaws} == {"cut_off"} for each in clean], dtype=float)
    share = proportion_interval(flagged - cut, np.arange(len(flagged)))
    found: dict[str, Any] = {
        "clean_rows": len(rest),
        "cut_off_only": round(float(cut.mean()), 4),
        "flagged_otherwise": round(share.estimate, 4),
        "flagged_otherwise_95": [round(share.low, 4), round(share.high, 4)],
        "flagged_by_kind": kinds,
        "auroc": {},
    }
    for name, (measure, plant, fits, sign) in PLANTS.items():
        rows = [(prompt, text) for prompt, text in rest if fits(prompt, text)][: options.rows]
        before = validator.validate(*_columns(rows))
        planted = [(prompt, plant(prompt, text, rng)) for prompt, text in rows]
        after = validator.validate(*_columns(planted))
        scores = [each.measures.get(measure) for each in (*before, *after)]
        known = [(sign * score, i >= len(rows)) for i, score in enumerate(scores) if score is not None]
        if not known:
            continue
        kept, labels = map(list, zip(*known, strict=True))
        found["auroc"][name] = {"rows": len(known) - sum(labels), "auroc": round(auroc(kept, labels), 3)}
        found["auroc"][name]["flagged"] = round(float(np.mean([bool(each.flaws) for each in after])), 3)
    if options.ordered:
        texts = options.ordered.read_text(encoding="utf-8").splitlines()
        found["auroc"]["order"] = _order_found(_reference(options.model), texts, rng)
    print(json.dumps(found))


def _order_found(reference: Any, texts: list[str], rng: random.Random) -> dict[str, Any]:
    """How well texts are told from themselves with sentences in other orders, five of each."""
    others = [_shuffled("", text, rng) for text in texts for _ in range(_ORDERS)]
    others = [other for other in others if other not in texts]
    both = [*texts, *others]
    scores = reference.coherence([""] * len(both), both)
    labels = [False] * len(texts) + [True] * len(others)
    return {"rows": len(texts), "others": len(others), "auroc": round(auroc(list(-scores), labels), 3)}


def _columns(rows: Any) -> list[list[str]]:
    return [list(column) for column in zip(*rows, strict=True)]


def _long(least: int) -> Callable[[str, str], bool]:
    return lambda prompt, text: len(sentences(text)) >= least and len(text.split()) >= 12


def _cut(prompt: str, text: str, rng: random.Random) -> str:
    """The text up to a word in the middle of its last sentence."""
    *whole, last = sentences(text)
    words = last.split()
    return " ".join([*whole, *words[: rng.randint(4, max(4, len(words) - 2))]]).rstrip(".!?,;:")


def _echoed(prompt: str, text: str, rng: random.Random) -> str:
    return prompt


def _shuffled(prompt: str, text: str, rng: random.Random) -> str:
    parts = sentences(text)
    return " ".join(rng.sample(parts, len(parts)))


def _foreign(prompt: str, text: str, rng: random.Random) -> str:
    parts = sentences(text)
    return " ".join([*parts[: -(len(parts) // 2)], *rng.sample(_FOREIGN, 2)])


PLANTS: dict[str, Any] = {
    "a sentence three more times": (
        "repetition",
        lambda prompt, text, rng: " ".join([text, *[rng.choice(sentences(text))] * 3]),
        _long(2),
        1,
    ),
    "a run of one word": (
        "repetition",
        lambda prompt, text, rng: f"{text} {' '.join([rng.choice(text.split())] * 10)}",
        _long(1),
        1,
    ),
    "the prompt again": ("echo", _echoed, lambda prompt, text: len(prompt.split()) >= 12, 1),
    "cut in a sentence": (
        "cut_off",
        _cut,
        lambda p, t: _long(2)(p, t) and len(sentences(t)[-1].split()) > 6,
        1,
    ),
    "half in another language": ("language", _foreign, _long(2), 1),
    "sentences in another order": ("coherence", _shuffled, _long(4), -1),
}
"""By flaw: the measure for it, what plants it, the rows that it can be planted in, the measure's sign."""


def _reference(model: str | None) -> ReferenceScorer | None:
    if model is None:
        return None
    from rlhf_models import load_causal_lm, load_tokenizer

    return ReferenceScorer(load_causal_lm(model), load_tokenizer(model))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(str(turn["content"]) for turn in value)


if __name__ == "__main__":
    main()
