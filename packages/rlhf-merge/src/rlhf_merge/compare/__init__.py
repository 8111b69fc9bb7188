"""What differs between models: inspection, task vectors and their conflicts, in text and as a heatmap."""
