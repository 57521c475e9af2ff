"""The processes of a run: the conductor, which holds the algorithm, and one worker per rank of every role."""
