"""Policy and monitor: their models, snapshots, and past players."""
