"""Generation engines and judges for RLHF."""

__all__: list[str] = []
