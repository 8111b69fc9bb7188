"""Completions of several models side by side: read, matched by prompt, selected, written."""
