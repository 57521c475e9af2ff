"""Process groups that no stranger enters: their stores, the proof of each pair of ranks, and what is unpickled in them.

Torch's stores and gloo have no authentication. So each value in a store carries an HMAC made with the run's secret,
gloo's ranks prove their identity to each other before a tensor travels, and collectives of objects unpickle only a few
classes.
Imported by `trainer`, `engine`, `weights` and `nodes`; may import `errors` and torch. All of it is in `_torch`,
which also has the private names of torch that the weight transfer needs.
"""
