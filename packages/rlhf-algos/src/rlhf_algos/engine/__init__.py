"""The training loop: batching, optimizer steps, DDP, FSDP2 and ZeRO, evaluation, resume; knows no method."""
