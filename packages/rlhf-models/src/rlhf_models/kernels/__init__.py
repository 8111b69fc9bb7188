"""Fast paths: the fused language-model head, linear layers on CPUs, torch.compile."""
