"""Rates of a batch, by hand."""

import pytest
import torch

from rlhf_infer import Rollout
from rlhf_minmax.formats import Critique
from rlhf_minmax.game.forward_pass import Answer, CritiqueSample
from rlhf_minmax.game.rates import form_match, spread_ratio, verdict_errors

VERDICTS = ("right", "wrong", None, "wrong", None, "wrong", "wrong")
LABELS = [True, True, True, False, False, False, False]


def critiques(verdicts):
    said = [None if verdict is None else Critique("a b", verdict, None) for verdict in verdicts]
    return [CritiqueSample(0, "", each, True, True, 1.0, Rollout([1], [2], [0.0], "stop")) for each in said]


def test_verdict_errors_by_hand():
    # Of three right answers one is called right, of four wrong ones three are called wrong; None errs.
    assert verdict_errors(critiques(VERDICTS), torch.tensor(LABELS)) == pytest.approx((2 / 3, 1 / 4))
    assert verdict_errors(critiques(VERDICTS[:3]), torch.tensor(LABELS[:3])) == (pytest.approx(2 / 3), None)
    assert verdict_errors(critiques(VERDICTS[3:]), torch.tensor(LABELS[3:])) == (None, 0.25)


def test_the_ratio_of_spreads_by_hand():
    # Within groups -1, 1 | -3, 3 and -1, 1 | 0, 0: mean squares 5 and 1/2.
    first, second = torch.tensor([1.0, 3.0, 4.0, 10.0]), torch.tensor([0.0, 2.0, 9.0, 9.0])
    groups = torch.tensor([0, 0, 1, 1])
    assert spread_ratio(first, second, groups) == pytest.approx(10**0.5)
    assert spread_ratio(second, first, groups) == pytest.approx(10**-0.5)
    level = torch.tensor([1.0, 1.0, 4.0, 4.0])
    assert spread_ratio(first, level, groups) is None and spread_ratio(level, first, groups) == 0


def test_the_wording_of_answers_by_hand():
    texts = {
        " it is shed .": "shed",
        "it is attic .": "attic",
        "shed": "shed",
        "hm": None,
        " it is hall .": "hall",
    }
    answers = [Answer(0, text, claim, False, None) for text, claim in texts.items()]
    # Of the four that name a choice the first and the last agree; a blank makes the second another text.
    assert form_match(answers, " it is {} .".format) == (0.5, "it is attic .")
    assert form_match(answers[:1], " it is {} .".format) == (1.0, "")
    assert form_match(answers[3:4], " it is {} .".format) == (None, "")
