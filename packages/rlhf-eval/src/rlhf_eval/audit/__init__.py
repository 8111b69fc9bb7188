"""Whether a run games its reward: the gap to a held-out reward with intervals, and hints without one."""
