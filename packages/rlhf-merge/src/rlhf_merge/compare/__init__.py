"""Inspecting and comparing models: task vectors and their conflicts, as text and as a heatmap."""
