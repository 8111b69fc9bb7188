"""Reward functions: rules, verifiable answers, models, remote scorers, constitutions, and all together."""

from rlhf_data import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
