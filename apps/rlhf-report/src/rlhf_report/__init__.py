"""Reports on data, runs and models."""

__all__: list[str] = []
