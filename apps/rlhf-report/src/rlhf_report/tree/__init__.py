"""Pictures of search trees: where the nodes go, and the page."""
