"""Generation with transformers models: prompts computed once, their samples decoded together."""
