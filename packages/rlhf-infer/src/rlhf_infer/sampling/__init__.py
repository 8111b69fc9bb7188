"""Strategies over engines: best-of-N, budgets, early stopping, votes, ensembles of policies."""
