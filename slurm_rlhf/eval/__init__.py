"""What an evaluation says about a model: statistics of scored responses, as pure functions of them.

What lives here: `estimators` (pass@k, majority vote, bootstrap), `responses` (the record of a scored response, and its
file), `report` (all of it for one data set, by source and length too), `words` (the same as text).

May import: the base modules and `config`; numpy, no torch. Who samples and scores is in `run`.

To add a figure: its estimator, a field of `report.DataSetReport`, and its name in `config.evaluation.metric_names` if
runs may choose their best checkpoint by it.
"""
