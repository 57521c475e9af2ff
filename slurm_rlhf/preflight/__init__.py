"""Know that a node is bad before any weights load: facts from every node, verdicts over them, culprits and remedies.

`examination` asks the nodes and judges; `needs` says what a run wants of them; `agent` is the process on each node: it
collects `facts` with `collect`, as it was told to, and talks to the `desk` of the conductor; `group_host` starts a
light process per rank for the collectives that `groups` lists. Pure: `network_checks`, `node_checks`, `file_checks` and
`speed_checks` turn facts into findings, in the order of `examination.judge`; `report` draws them. `placement.spares`
chooses the nodes that a run starts on.

May import the base modules, placement, cluster, launch and weight_sync. torch in `group_rank` only, inside functions.

To add a check: a fact in `facts.NodeFacts`, collected in `collect`, a function in one of the `..._checks` files, and
its place in `examination.judge`.
"""
