"""Evaluates models: samples and scores data sets, and computes statistics of the scored responses.

`sets` samples and scores, for a training run, and writes files. The rest are pure functions: `report` (the record of a
scored response, the statistics of one data set, also by source and length, their estimators, and the same as text), and
`verdicts`, which decides for the self-check. No torch.

To add a figure: its estimator, a field of `report.DataSetReport`, and its name in `config.evaluation.metric_names` if
runs may choose their best checkpoint by it.
"""
