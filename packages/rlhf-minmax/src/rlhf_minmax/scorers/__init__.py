"""Reward models and judges of a game, held-out ones, and what judges behind an API cost."""
