"""`rlhf-report monitor`: the terminal view, the local page, the alert command."""
