"""The training loop: batching, optimizer steps, evaluation, resume; knows no method."""
