"""Rewards given by judges: directly, or by the principles of a constitution."""
