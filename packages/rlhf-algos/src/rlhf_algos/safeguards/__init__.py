"""Safeguards against forgetting in training: tested capability suites, elastic weight consolidation."""
