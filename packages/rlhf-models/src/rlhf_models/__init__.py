"""Policy, reward, judge and value models, LoRA adapters, packed attention and log-probs."""

import logging

from rlhf_data import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)

# At every import bitsandbytes warns of a missing optional kernel, which serves a path not taken here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
