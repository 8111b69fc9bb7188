"""Shorter contexts: selection of a text's tokens by surprisal and question, eviction of keys and values."""
