"""Process groups that no stranger enters: their stores, the proof of each pair of ranks, and what is unpickled in them.

Torch's stores and gloo know no password. So what ranks write into a store carries an HMAC of the run's secret, gloo's
ranks prove themselves to each other before a tensor travels, and torch's collectives of objects admit a few classes.
Imported by `trainer`, `engine`, `weights` and `nodes`; may import `errors` and torch. All of it is in
`_torch`, which has the private names of torch that it needs, those of the weight transfer included.
"""
