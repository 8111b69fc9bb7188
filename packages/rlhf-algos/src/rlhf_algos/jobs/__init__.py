"""Whole jobs: settings, data, model, training, results; the table of methods."""
