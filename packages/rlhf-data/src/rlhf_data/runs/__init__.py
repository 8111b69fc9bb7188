"""Run folders, atomic writes, checksums, and paths that resolve from anywhere."""
