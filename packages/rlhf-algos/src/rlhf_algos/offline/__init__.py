"""Methods that learn from given data, a module for each."""
