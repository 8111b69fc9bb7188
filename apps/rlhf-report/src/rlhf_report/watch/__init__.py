"""`rlhf-report monitor`: the terminal, the local page, the command that is told of alerts."""
