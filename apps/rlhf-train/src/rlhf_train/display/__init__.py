"""Terminal output: plan, progress, tables, results."""
