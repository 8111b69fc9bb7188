"""Training runs side by side: stability, convergence, efficiency, quality, on numpy alone."""
