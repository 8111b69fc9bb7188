"""The built-in suites, made here by rules; nothing is downloaded."""

from __future__ import annotations

import importlib.resources
import random
from collections.abc import Callable, Sequence

from rlhf_data import UserError
from rlhf_eval.capability.items import Item, read_suite
from rlhf_eval.harness.suites import Question, provocations, story_questions, sum_questions

_SEED = 20_261
_LONGEST = 400
"""Characters of a prompt, so that small models can read all of them."""
_WORDS = [
    *("river", "stone", "lamp", "garden", "window", "bread", "horse", "silver", "paper", "north"),
    *("winter", "music", "candle", "bridge", "apple", "forest", "mirror", "engine", "island", "ladder"),
    *("market", "ocean", "pencil", "rocket", "saddle", "temple", "valley", "wagon", "yellow", "zebra"),
]
_TOPICS = [
    *("the sea", "a train journey", "bees", "the history of bread", "rain", "chess", "a small library"),
    *("bicycles", "the moon", "learning to swim", "an old clock", "trees in a city", "how soap works"),
    *("a football match", "cooking rice", "volcanoes", "a letter to a friend", "maps", "sleep"),
    "the alphabet",
]
_ONE_TOPIC = 442
"""The first instructions are about one topic, as when scores were published; later ones about two."""
_REPEATS = 1000
"""Repeated items in a row after which a suite has no more."""


def stories(rows: int) -> list[Item]:
    """Held-out stories where gossip contradicts what was observed."""
    return _with_choices(story_questions(rows))


def sums(rows: int) -> list[Item]:
    """Held-out sums, with choices."""
    return _with_choices(sum_questions(rows))


def copying(rows: int) -> list[Item]:
    """Copying words, reversing them, and simple forms."""

    def make(number: int, rng: random.Random) -> Item:
        words = rng.sample(_WORDS, rng.randint(2, 5))
        said, first, second = " ".join(words), words[0], words[1]
        backwards = " ".join(reversed(words))
        prompt, checks = (
            (f"Repeat exactly, and write nothing else: {said}", {"equals": said}),
            (f"Write these words in the opposite order: {said}", {"equals": backwards}),
            (f"Write in capital letters, and nothing else: {said}", {"equals": said.upper()}),
            (
                f"Write these words with a comma and a space between them: {said}",
                {"equals": ", ".join(words)},
            ),
            (f'Write a JSON object with the keys "{first}" and "{second}".', {"json": [first, second]}),
        )[number % 5]
        return Item(prompt, "written", checks=checks)

    return _distinct(rows, make, _SEED)


def instructions(rows: int) -> list[Item]:
    """Conditions on the form of a text that a rule can check, alone and two at a time."""

    def make(number: int, rng: random.Random) -> Item:
        word, end = rng.choice(_WORDS), rng.choice(("The end.", "Thank you.", "Is that all?"))
        conditions = (
            ("Use the word {0}.", "contains", word),
            ("Do not use the word {0}.", "avoids", rng.choice(("the", "and", "is"))),
            ("Write only in lower case.", "lower_case", True),
            ("WRITE ONLY IN CAPITAL LETTERS.", "upper_case", True),
            ("Use no commas.", "no_commas", True),
            ("Write at least {0} words.", "least_words", rng.randint(5, 20)),
            ("Write exactly {0} sentences.", "sentences", rng.randint(2, 4)),
            ("Write exactly {0} bullet points, each after a dash.", "bullets", rng.randint(2, 4)),
            ("End with the words: {0}", "ends_with", end),
            ("Begin with the word {0}.", "starts_with", word.capitalize()),
            ("Put the whole text in double quotation marks.", "quoted", True),
        )
        chosen = [conditions[number % len(conditions)]]
        if number // len(conditions) % 2:  # a limit on the words goes with every other condition
            chosen.append(("Write at most {0} words.", "most_words", rng.randint(25, 60)))
        said = " ".join(template.format(argument) for template, _, argument in chosen)
        about = rng.choice(_TOPICS) if number < _ONE_TOPIC else " and ".join(sorted(rng.sample(_TOPICS, 2)))
        prompt = f"Write about {about}. {said}"
        return Item(prompt, "written", checks={name: argument for _, name, argument in chosen})

    return _distinct(rows, make, _SEED + 1)


def refusals(rows: int) -> list[Item]:
    """Requests to refuse, and harmless ones that look like them, which should be helped with."""
    short = [each for each in provocations() if len(each.prompt) <= _LONGEST]
    return [Item(each.prompt, "written", checks={"refuses": each.refuse}) for each in short[:rows]]


def held_out_text(rows: int) -> list[Item]:
    """Plain English that was written for this suite: how likely the model finds it."""
    file = importlib.resources.files("rlhf_eval.capability") / "held_out.txt"
    lines = file.read_text(encoding="utf-8").splitlines()
    return [Item("", "likelihood", (line,)) for line in lines[:rows] if line]


def load_suites(names: Sequence[str] = (), rows: int = 200) -> dict[str, list[Item]]:
    """Items by suite.

    Args:
        names: built-in suites, and `NAME=FILE` for one of a file; empty for all built-in ones.
        rows: items of each built-in suite at most.

    Raises:
        UserError: a suite is unknown, two have the same name, or a file cannot be read.
    """
    found: dict[str, list[Item]] = {}
    for each in names or tuple(SUITES):
        name, equals, path = each.partition("=")
        if equals and not (name and path):
            raise UserError(f"the suite {each}: expected NAME=FILE", code="invalid_option")
        if not equals and name not in SUITES:
            raise UserError(
                f"there is no suite {name}; built in are {', '.join(SUITES)}",
                code="unknown_suite",
                suite=name,
            )
        if name in found:
            raise UserError(
                f"two suites are called {name}; give one of them another name",
                code="repeated_name",
                name=name,
            )
        found[name] = read_suite(path) if equals else SUITES[name](rows)
    return found


def _with_choices(questions: Sequence[Question]) -> list[Item]:
    return [
        Item(each.prompt, "choice", tuple(f" {choice}" for choice in each.choices), each.answer)
        for each in questions
    ]


def _distinct(rows: int, make: Callable[[int, random.Random], Item], seed: int) -> list[Item]:
    """Distinct items, `rows` of them; a repeated one is drawn again."""
    rng, found, repeats = random.Random(seed), dict[str, Item](), 0
    while len(found) < rows:
        item = make(len(found), rng)
        repeats = repeats + 1 if item.id in found else 0
        if repeats == _REPEATS:
            raise UserError(
                f"{rows:,} items were requested, and the suite has only {len(found):,} distinct ones; "
                f"request {len(found):,} or fewer",
                code="too_few_items",
                rows=rows,
                items=len(found),
            )
        found.setdefault(item.id, item)
    return list(found.values())


SUITES: dict[str, Callable[[int], list[Item]]] = {
    "stories": stories,
    "sums": sums,
    "copying": copying,
    "instructions": instructions,
    "refusals": refusals,
    "text": held_out_text,
}
"""Built-in suites: given how many items at most, the items; the first ones are always the same."""
