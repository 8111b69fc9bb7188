"""What generates: transformers or vLLM behind one interface."""
