"""Updates of both players on two time scales: clipped policy gradients."""
