"""Attacks on a model: prompts changed so that what is right stays the same, and how often it then errs."""

from rlhf_eval.attacks.attack import AttackReport as AttackReport
from rlhf_eval.attacks.attack import Rated as Rated
from rlhf_eval.attacks.attack import TransformResult as TransformResult
from rlhf_eval.attacks.attack import attack as attack
from rlhf_eval.attacks.page import attack_page as attack_page
from rlhf_eval.attacks.page import attack_sentence as attack_sentence
from rlhf_eval.attacks.transforms import TRANSFORMS as TRANSFORMS
