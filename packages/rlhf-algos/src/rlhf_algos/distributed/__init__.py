"""Training, rollouts and rewards on a Ray cluster; only the modules of this room import ray, and `config` does not."""
