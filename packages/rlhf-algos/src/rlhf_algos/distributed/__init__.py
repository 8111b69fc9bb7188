"""Training, rollouts and rewards on a Ray cluster; only this room imports ray, and its `config` does not."""
