"""A merge from plan to result: planning, matching models, the streaming engine, soups, the model card."""
