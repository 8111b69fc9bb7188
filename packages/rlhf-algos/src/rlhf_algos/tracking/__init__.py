"""Metrics, trackers, progress lines and debug switches."""
