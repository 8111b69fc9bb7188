"""The embedded demonstration's models, written by `scripts/build_demo.py`, and prompts for them."""
