"""A whole run: job, trainer, pre-flight checks, dry run, memory, processes."""
