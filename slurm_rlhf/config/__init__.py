"""Define, read and check the configuration, and know the roles of a run.

No torch and no numpy, so that a login node starts at once. Here live the schema (each key with its type, range and
docstring, from which the help is made), the table of roles, loading and writing TOML, rules over several keys, and
checks of files and model directories. May import the base modules, and the records of `algorithms`.

To add a key: a field with a range and a docstring in `schema.py`. To add a rule: a function in `rules.py` whose
docstring is the sentence for the user, or one in `check.py` if it looks at files. To add a role: a row in `roles.py`,
its group in `schema.py`, its worker in ranks/.
"""
