"""Reward models and judges of a game, held-out ones, and the cost of judges behind an API."""
