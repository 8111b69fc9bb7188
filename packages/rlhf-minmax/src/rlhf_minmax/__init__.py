"""MinMax RLHF: a policy and a monitor trained against each other."""

from rlhf_data import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
