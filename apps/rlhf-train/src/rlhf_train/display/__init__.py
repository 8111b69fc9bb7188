"""What a person sees: plan, progress, tables, results."""
