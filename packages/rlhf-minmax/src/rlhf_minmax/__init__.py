"""MinMax RLHF: a policy and a monitor trained against each other."""

__all__: list[str] = []
