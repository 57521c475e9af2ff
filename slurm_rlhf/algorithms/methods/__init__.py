"""Define algorithms: one file per family, each with its records (`registry.Algorithm`), which the registry finds.

Add an algorithm: write a file here with its advantage function, its source and its record; a recipe for it goes to
`sbatch/recipes/`. Pure functions of numpy arrays only, as in the rest of `algorithms/`.
"""
