"""Scoring tokens: packed log-probs, the language-model head, router loss, dropout, encoding."""
