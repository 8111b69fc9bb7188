"""Generation with vLLM, in this process or as a server, and weights that reach it during training."""
