"""What keeps a training from losing what its model could do: suites that are tested, penalties."""
