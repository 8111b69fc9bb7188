"""Generation engines, reward functions and judges for RLHF."""

from rlhf_data import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
