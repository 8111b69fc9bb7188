"""LoRA adapters as peft saves them, and tensors with their update added."""
