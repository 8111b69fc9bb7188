"""Running a module over several processes and in a precision: DDP, FSDP2, ZeRO; knows no training loop."""
