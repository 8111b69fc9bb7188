"""Policy and monitor: their models, snapshots, past players and when one is met."""
