r"""Notation that math-verify ignores: units, number bases, sets as opposed to tuples."""

from __future__ import annotations

import re

from rlhf_infer.rewards.answers.read_answers import NAMED_NUMBERS

_TEXT = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*"
_POWER = r"\s*\^\s*(?:\{\s*\d\s*\}|\d)"
_SPACE = r"(?:\\[,;:! ]|\\cdot(?![A-Za-z])|[\s/.~·])"
_WORDS = re.compile(rf"(?:{_TEXT}\{{(?:[^\W\d_]|[\s./~²³°()$-]|\^\s*\d)+\}}(?:{_POWER})?|{_SPACE})+")
_PLAIN = re.compile(
    rf"(?:[^A-Za-z\\]|\\[A-Za-z]+|\\[^A-Za-z])*?[\d}})]{_SPACE}*(?P<unit>[^\W\d_](?:[^\W\d_]|[\s./²³]|{_POWER})*)"
)
_BASE = re.compile(
    r"(?<![a-zG-Z\\_^\d])(?:[A-F]*\d+|[0-9A-F]+(?=\s*_\s*\{1[1-6]\}))\s*_\s*"
    r"(?:\{(?P<braced>[^{}]*(?:\{[^{}]*\})?[^{}]*)\}|(?P<digit>\d))"
)
_BASE_WORD = re.compile(r"\bbase\W{0,2}(\w+)")
_SIDE = re.compile(r"=|\\approx|≈|\\in(?![A-Za-z])")
_RELATION = re.compile(r"\\mid|[:|<>]|\\[lg]eq?(?![A-Za-z])")
_SPELLINGS = """
mm millimeter millimetre; cm centimeter centimetre; m meter metre; km kilometer kilometre; inch in;
foot ft feet; yard yd; mile mi; mg milligram; g gram gm; kg kilogram; pound lb; ounce oz;
ml milliliter millilitre; liter l litre; second s sec; ms millisecond; minute min; hour h hr; day; week;
month; year yr; dollar usd; cent; degree deg; c celsius; f fahrenheit;
newton n; joule j; watt w; volt v; hz hertz
"""
_NAMES = {word: names.split()[0] for names in _SPELLINGS.split(";") for word in names.split()}
_COMPOUND = {"mph": "mile/hour", "kph": "km/hour", "kmh": "km/hour"}


def contradict(gold: str, answer: str) -> bool:
    r"""Whether an answer cannot be the right one, however equal the values that math-verify finds.

    So it is where both name a unit and not the same; where the right answer is in a base (`120_5`) and the
    answer not in the same; and where one is a set `\{1,2\}` and the other a tuple or open interval `(1,2)`.
    Units are compared by name, common abbreviations and plurals being the same name; nothing is converted.
    """
    units = unit_of(gold), unit_of(answer)
    if all(units) and units[0] != units[1]:
        return True
    if (bases := _bases(gold)) and bases != _bases(answer):
        return True
    return {_list_kind(gold), _list_kind(answer)} == {"set", "tuple"}


def unit_of(formula: str) -> str:
    r"""The unit after an amount, under one name for all its spellings; empty if there is none.

    Words in `\text{}` and the like are a unit if nothing follows them, whatever they say; others are where
    all of them are known as units.
    """
    formula = _SIDE.split(formula)[-1].strip().rstrip(".")
    text = re.search(_TEXT, formula)
    if text is not None:
        amount, unit = formula[: text.start()], formula[text.start() :]
        return _unit_name(unit) if amount.strip(" \\~,;") and _WORDS.fullmatch(unit) else ""
    plain = _PLAIN.fullmatch(formula)
    if plain is None:
        return ""
    name = _unit_name(plain["unit"])
    known = {*_NAMES.values()}
    return name if all(part.partition("^")[0] in known for part in re.split("[ /]", name)) else ""


def _unit_name(text: str) -> str:
    """Words of a unit with one spelling each: `km/hour`, `m^2`."""
    text = re.sub(r"[{}$]", "", re.sub(_TEXT, " ", text)).replace("²", "^2").replace("³", "^3").lower()
    text = re.sub(r"\bsquared\b", "^2", re.sub(r"\bcubed\b", "^3", text))
    text = re.sub(r"\bper\b", "/", re.sub(r"\s*\^\s*(\d)", r"^\1", text.replace(".", "")))
    names: list[str] = []
    power = ""
    for word in re.findall(r"[^\W\d_]+(?:\^\d)?|/", text):
        if word in ("square", "sq", "cubic", "cu"):
            power = "^2" if word.startswith("s") else "^3"
            continue
        bare, caret, exponent = word.partition("^")
        names.append(word if word == "/" else _spelled(bare) + (caret + exponent or power))
        power = "" if word != "/" else power
    if len(names) > 1:  # \$5 per hour is 5 dollars per hour, 5 °C is 5 degrees Celsius
        names = [name for name in names if name not in ("dollar", "degree")]
    return re.sub(" ?/ ?", "/", " ".join(names))


def _spelled(word: str) -> str:
    """One name for all spellings of a word of a unit."""
    if word in _COMPOUND:
        return _COMPOUND[word]
    one = re.sub(r"(?<=[sxz])es$|(?<=[cs]h)es$|(?<=[^s])s$", "", word) if len(word) > 2 else word
    return _NAMES.get(word) or _NAMES.get(one, one)


def _bases(formula: str) -> list[str]:
    r"""The bases of a formula's numbers: `120_5`, `120_{\text{five}}`, `120 (base 5)`."""
    found = [match["braced"] or match["digit"] for match in _BASE.finditer(formula)]
    found = [re.sub(r"\\text|\\mathrm|base|[\W_]", "", base) for base in found]
    found = found or _BASE_WORD.findall(formula)
    return sorted(str(NAMED_NUMBERS.get(base.lower(), base)) for base in found)


def _list_kind(formula: str) -> str:
    """`set` or `tuple` (or open interval) for a list of several in one pair of such brackets; else empty."""
    bare = _SIDE.split(re.sub(r"\\(?:left|right)(?![A-Za-z])|[\s$]", "", formula))[-1]
    bare = bare.replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}").replace(r"\{", "<").replace(r"\}", ">")
    if bare[:1] + bare[-1:] not in ("<>", "()"):
        return ""
    inside, depth, commas = bare[1:-1], 0, 0
    for character in inside:
        depth += (character in "<([{") - (character in ">)]}")
        commas += character == "," and not depth
        if depth < 0:
            return ""
    if not commas or (bare[0] == "<" and _RELATION.search(inside)):
        return ""
    return "set" if bare[0] == "<" else "tuple"
