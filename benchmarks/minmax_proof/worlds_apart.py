"""Do labels of one world help a policy in another?

    uv run python benchmarks/minmax_proof/worlds_apart.py --labels sums \
        --output benchmarks/results/worlds_apart_sums.json

The policy plays stories and sums alike, half of each, and one base, flawed reward model and tokenizer know
both.  Right answers are known to the game in one of the worlds; accuracy is measured in the other, on 512
held-out records.  Arms and settings are those of `label_efficiency.py`.  Prints JSON: every seed's value,
means with 95% intervals, and paired differences of `minmax` to each arm.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cells import arms_parser, difference, play_cells, provenance, publish, summary
from label_efficiency import MONITOR, SHOWN, play_arm

from rlhf_data import QARecord, generate_stories, generate_sums
from rlhf_data.worlds.sums import read_working
from rlhf_minmax import Stories, StoryRules, SumRules, TextRules, load_stories

ARMS = ("minmax", "truth_only", "rlvr", "sft", "refit", "plain")
DRAWS = {"stories": generate_stories, "sums": generate_sums}
SECTIONS = {"stories": "story_world", "sums": "sum_world"}
SETTINGS = ["demo.pretrain_steps=600", "demo.min_judge_accuracy=0.8"]
"""The base learns two worlds, in twice as many steps as one; the judge's gate is that of sums."""


def _world(record: QARecord) -> str:
    return "sums" if "terms" in record.extra else "stories"


class RulesOfBoth(TextRules):
    """A story is read by the story world's rules, a sum by the sum world's."""

    def __init__(self) -> None:
        super().__init__()
        self.stories, self.sums = StoryRules(), SumRules()

    def of(self, record: QARecord) -> TextRules:
        """The rules of the record's world."""
        return self.sums if _world(record) == "sums" else self.stories

    def claim(self, record: QARecord, answer: str) -> str | None:
        """As in the record's world."""
        return self.of(record).claim(record, answer)

    def correct_evidence(self, record: QARecord) -> str | None:
        """As in the record's world."""
        return self.of(record).correct_evidence(record)

    def possible_evidence(self, record: QARecord) -> list[str]:
        """As in the record's world."""
        return self.of(record).possible_evidence(record)

    def evidence_holds(self, record: QARecord, evidence: str) -> bool:
        """As in the record's world."""
        return self.of(record).evidence_holds(record, evidence)

    def rival(self, record: QARecord) -> str | None:
        """As in the record's world."""
        return self.of(record).rival(record)

    def rival_evidence(self, record: QARecord) -> str | None:
        """As in the record's world."""
        return self.of(record).rival_evidence(record)

    def is_hack(self, record: QARecord, claim: str | None) -> bool | None:
        """As in the record's world."""
        return self.of(record).is_hack(record, claim)

    def refutes(self, record: QARecord, evidence: str, claim: str) -> bool | None:
        """As in the record's world."""
        return self.of(record).refutes(record, evidence, claim)

    def supports(self, evidence: str, claim: str | None) -> bool | None:
        """A working speaks for its sum, a sentence for its place."""
        return (self.sums if read_working(evidence) else self.stories).supports(evidence, claim)


def mixed_stories(config: Any, *, labels: str) -> Stories:
    """Half stories, half sums; answers are known in the world `labels`, held-out records are of the other."""
    data, building = config.data, []
    for world, draw in DRAWS.items():
        section = getattr(data, SECTIONS[world])
        building += draw(section, data.train_stories // 2, split="train", seed=config.seed)
    random.Random(config.seed).shuffle(building)  # scales are measured on the first ones
    train = [record if _world(record) == labels else replace(record, answer=None) for record in building]
    other = next(world for world in DRAWS if world != labels)
    held_out = DRAWS[other](getattr(data, SECTIONS[other]), data.eval_stories, split="eval", seed=config.seed)
    prompts = replace(load_stories(config).prompts, rules=RulesOfBoth())
    return Stories(train, held_out, building, prompts, label_share=0.5)


def play(labels: str, seed: int, arm: str, work: Path) -> dict[str, Any]:
    """One run; see `cells.play_cells`."""
    draw = partial(mixed_stories, labels=labels)
    return play_arm(arm, [f"seed={seed}", *SETTINGS], work, f"{labels}-{seed}-{arm}", draw)


def main() -> None:
    """Command line."""
    parser = arms_parser(__doc__, ARMS, [51, 52, 53, 54, 55], "worlds")
    parser.add_argument("--labels", choices=tuple(DRAWS), default="sums")
    options = parser.parse_args()
    labels, seeds = options.labels, options.seeds
    arms = ["minmax", *(arm for arm in options.arms if arm != "minmax")]
    first = [(labels, seed, "minmax") for seed in seeds]
    waves = [first, [(labels, seed, arm) for arm in arms[1:] for seed in seeds]]
    cells = [cell for wave in waves for cell in wave]
    results = dict(zip(cells, play_cells(play, waves, options.work.resolve(), options.workers), strict=True))

    def row(arm: str, name: str) -> list[Any]:
        return [results[labels, seed, arm].get(name) for seed in seeds]

    names = (*SHOWN, *MONITOR, "num_tokens", "seconds", "cpu_seconds")
    found = {"benchmark": "worlds_apart", "labels_of": labels, "seeds": seeds, **provenance()}
    found["start"] = summary(row("minmax", "start"))
    found["arms"] = {arm: {name: summary(row(arm, name)) for name in names} for arm in arms}
    own = row("minmax", "accuracy")
    found["minmax_minus"] = {arm: difference(own, row(arm, "accuracy")) for arm in arms[1:]}
    publish(found, options.output)


if __name__ == "__main__":
    main()
