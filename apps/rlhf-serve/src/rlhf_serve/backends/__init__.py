"""Generation with transformers or vLLM behind one interface."""
