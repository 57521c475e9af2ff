"""Keep strangers out of process groups: sign values in stores, authenticate each pair of ranks, restrict unpickling.

Torch's stores and gloo know no password. So values that ranks write into a store carry an HMAC by the run's secret,
gloo's ranks prove themselves to each other before a tensor travels, and torch's collectives of objects unpickle a few
classes only. Imported by `trainer`, `engine`, `weights` and `nodes`; may import `errors` and torch. All code is in
`_torch`, the fence for the private names of torch, also for those that the weight transfer needs.
"""
