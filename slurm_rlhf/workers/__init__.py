"""What runs in the ranks of a role: one process per rank, under torchrun."""
