"""Data sets that stay on disk: shards, their order, and rows read ahead of the step."""
