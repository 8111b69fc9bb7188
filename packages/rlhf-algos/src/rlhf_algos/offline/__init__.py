"""Methods that learn from given data: SFT, DPO, SimPO, KTO, reward and process reward models."""
