"""Runs as they go on: their logs, read while they are written, what looks wrong in them, a page."""
