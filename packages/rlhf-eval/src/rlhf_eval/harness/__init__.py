"""Our engines and suites inside other evaluation harnesses: a model and tasks for lm-eval and for inspect-ai.

Each file but `scoring` and `suites` imports its harness, which the extra `harness` installs; nothing else
of this package does.
"""
