"""Rewards for answers that can be checked: numbers, choices, exact texts, and how they are read."""
