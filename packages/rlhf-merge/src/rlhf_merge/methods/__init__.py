"""The merge methods: their parameters, maths and block-wise arithmetic on tensors; no files, no configs."""
