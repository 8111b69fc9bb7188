"""Several methods trained at equal budgets and measured alike: the plan, the budget, the policies."""
