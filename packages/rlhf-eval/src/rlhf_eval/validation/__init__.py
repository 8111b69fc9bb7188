"""Flaws of completions that can be found without knowing the right answer."""

from rlhf_eval.validation.consistency import Claim as Claim
from rlhf_eval.validation.consistency import NLIModel as NLIModel
from rlhf_eval.validation.flaws import Flaw as Flaw
from rlhf_eval.validation.language_models import ReferenceScorer as ReferenceScorer
from rlhf_eval.validation.validator import AdversarialValidator as AdversarialValidator
from rlhf_eval.validation.validator import Validation as Validation
from rlhf_eval.validation.validator import ValidatorConfig as ValidatorConfig
