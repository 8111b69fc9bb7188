"""LoRA adapters: several on one frozen backbone, and their files in PEFT's format."""
