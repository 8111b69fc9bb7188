"""Policy, reward, judge and value models, LoRA adapters, packed attention and log-probs."""

__all__: list[str] = []
