"""Pairwise comparison of answers to a prompt: by a judge in both orders, or by a reward's scores."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlhf_data import Text, UserError
from rlhf_eval.evaluation.written import as_read
from rlhf_eval.scoring import Scorer, as_text, load_scorer

if TYPE_CHECKING:
    from rlhf_infer import APIJudge

_OPENAI = ("https://api.openai.com/v1", "gpt-4.1-mini")
"""Server and model of `openai` unless OPENAI_BASE_URL and OPENAI_MODEL are set."""
_CHARACTERS_PER_TOKEN = 4
_ASKED_CHARACTERS = 600
"""Characters of the template around a question and two answers, for estimates of cost."""


class Verdicts(NamedTuple):
    """The probability (n,) that the first of two answers is better; NaN where a reply could not be read.

    Attributes:
        ahead: the probability when it was shown first.
        behind: the probability when it was shown second.
    """

    ahead: np.ndarray
    behind: np.ndarray


class PairJudge:
    """Compares two answers to a prompt, without knowing which models wrote them.

    Args:
        line: its name on a command line, and the key under which its verdicts are saved.
        name: its name in reports.
        compare: gives the verdicts on n prompts, first answers and second answers, texts or messages.
        has_order: whether the order of the answers can change its verdict.
        judge: a judge behind an API, for its usage; None otherwise.
    """

    def __init__(
        self,
        line: str,
        name: str,
        compare: Callable[[Sequence[Text], Sequence[Text], Sequence[Text]], Verdicts],
        *,
        has_order: bool,
        judge: APIJudge | None = None,
    ) -> None:
        self.line, self.name, self.compare = line, name, compare
        self.has_order, self._judge = has_order, judge

    @property
    def is_remote(self) -> bool:
        """Whether texts are sent to a server."""
        return self._judge is not None

    @property
    def usage(self) -> dict[str, Any] | None:
        """Requests, tokens and cost so far; None without an API."""
        return None if self._judge is None else asdict(self._judge.usage)

    def price(self, questions: Sequence[str], firsts: Sequence[str], seconds: Sequence[str]) -> str:
        """Estimate of a comparison: requests, tokens at four characters each, cost."""
        characters = sum(map(len, (*questions, *firsts, *seconds))) + _ASKED_CHARACTERS * len(questions)
        tokens = 2 * characters // _CHARACTERS_PER_TOKEN
        text = f"{2 * len(questions):,} requests, about {tokens:,} prompt tokens"
        assert self._judge is not None
        settings = self._judge.settings
        cost = settings.cost(tokens, 2 * len(questions) * settings.reply_tokens)
        return text if cost is None else f"{text}, about {cost:.2f} in the currency of the prices"

    def probe(self) -> None:
        """Ask once, so that a judge that cannot be reached is found before anything is generated.

        Raises:
            UserError: it cannot be reached, or its reply cannot be read.
        """
        self.compare(["Which number is larger?"], ["2"], ["1"])


def load_judge(line: str, *, cache_folder: Path | None = None) -> PairJudge:
    """The judge that a line names.

    Args:
        line: `judge:path=FOLDER`, a language model; `judge:url=URL,model=NAME`, one behind an
            API; `openai`, the same with OPENAI_BASE_URL, OPENAI_MODEL and OPENAI_API_KEY; or any reward of
            `rlhf-train --reward`, by which the answer with the higher score is the better one.
        cache_folder: where replies of an API are kept.

    Raises:
        UserError: it names none, or the judge cannot be loaded.
    """
    if line == "openai":
        url, model = os.environ.get("OPENAI_BASE_URL", _OPENAI[0]), os.environ.get("OPENAI_MODEL", _OPENAI[1])
        line = f"judge:url={url},model={model}"
    if not line.startswith("judge:"):
        return _by_score(load_scorer(line))
    try:
        import torch

        from rlhf_infer import RewardFunctionFactory
        from rlhf_infer.judges.pairwise import PAIR_NUMBER_TEMPLATE, PAIR_TEMPLATE, PairwiseJudge
    except ImportError as error:
        raise UserError(
            f'a judge needs more than is installed ({error}); run pip install "rlhf-report[models]"',
            code="missing_package",
        ) from error
    options: dict[str, Any] = {}
    if "template=" not in line:
        options["template"] = PAIR_NUMBER_TEMPLATE if "answer=number" in line else PAIR_TEMPLATE
    if "url=" in line and "cache=" not in line and cache_folder is not None:
        options["cache"] = str(cache_folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made: Any = RewardFunctionFactory.from_spec(line, model_options={"device": device}, **options)
    judge = made.judge
    pairwise = PairwiseJudge(judge)

    def compare(prompts: Sequence[Text], firsts: Sequence[Text], seconds: Sequence[Text]) -> Verdicts:
        found = pairwise.compare(*([as_text(each) for each in texts] for texts in (prompts, firsts, seconds)))
        probability, place = found.probability.double().numpy(), found.first_position.double().numpy()
        # p(ahead) = P + f/2 and p(behind) = P − f/2, by the definitions in `PairwiseJudge`.
        return Verdicts(np.clip(probability + place / 2, 0, 1), np.clip(probability - place / 2, 0, 1))

    api = judge if hasattr(judge, "usage") else None
    return PairJudge(line, _short_name(line, made.name), compare, has_order=True, judge=api)


def read_env_file(path: str) -> dict[str, str]:
    """Variables of a file of `NAME=value` lines, with or without `export` and quotes; comments are left out.

    Raises:
        UserError: it cannot be read, a line is not such a pair, or users other than its owner may read it.
    """
    try:
        mode = os.stat(path).st_mode
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} cannot be read ({getattr(error, 'strerror', None) or error})", code="unreadable_file"
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(
            f"{path} holds keys and others may read it; run chmod 600 on it", code="file_not_private"
        )
    found = {}
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip().removeprefix("export ").strip()
        if not stripped or stripped.startswith("#"):
            continue
        name, equals, value = stripped.partition("=")
        if not equals or not name.strip().isidentifier():
            raise UserError(f"{path}, line {number}: expected NAME=value", code="invalid_option")
        found[name.strip()] = value.strip().strip("'\"")
    return found


def _by_score(scorer: Scorer) -> PairJudge:
    def scores(prompts: Sequence[Text], answers: Sequence[Text]) -> np.ndarray:
        read = [as_read(scorer.reads_chat, *each) for each in zip(prompts, answers, strict=True)]
        return scorer([prompt for prompt, _ in read], [answer for _, answer in read]).mean(0)

    def compare(prompts: Sequence[Text], firsts: Sequence[Text], seconds: Sequence[Text]) -> Verdicts:
        better = (1 + np.sign(scores(prompts, firsts) - scores(prompts, seconds))) / 2
        return Verdicts(better, better)

    return PairJudge(scorer.name, scorer.name, compare, has_order=False)


def _short_name(line: str, name: str) -> str:
    """The name given in the line, else the model's."""
    parts = (part.partition("=") for part in line.partition(":")[2].split(","))
    options = {key: value for key, _, value in parts}
    model = options.get("model") or Path(options.get("path", "")).name
    return name if "name" in options or not model else f"judge {model}"
