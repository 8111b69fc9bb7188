"""Methods that learn from the model's own completions: GRPO, PPO, their rollouts and pre-flight."""
