"""Rollouts on a Ray cluster; only the modules of this room import ray, and `config` does not."""
