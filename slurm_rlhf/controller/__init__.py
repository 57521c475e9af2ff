"""What runs in the conductor: the loop, the step, and the supervision of every process of a run."""
