"""The table of time-outs that no key of the configuration sets; keys set those in `config.schema_jobs.Timeout`.

In seconds; names in MS are in milliseconds. Each comment names the wait that the time-out bounds.
"""

from __future__ import annotations

# --- pauses ---
POLL_S = 0.1  # the pause between two looks at something that sends no message
DEVICE_POLL_S = 0.0005  # the pause between two looks at an operation of a GPU

# --- conductor and ranks ---
HANDSHAKE_MS = 5_000  # the handshake of a connection to the conductor: a stranger holds it no longer
CONNECT_HANDSHAKE_MS = 30_000  # the handshake as a rank sees it: the conductor may be busy
LINGER_MS = 1_000  # the sending of the last messages, once a socket is closed
CONTEXT_END_S = 5.0  # the end of ZeroMQ's thread: libzmq 4.3.5 may wait without end if ranks are killed as they connect
PREEMPTION_S = 1.0  # the conductor's own SIGTERM, after all ranks had one: `scancel` sends it, too, and then it decides
LAST_WORDS_S = 1.0  # the sending of the last messages, before an engine's rank ends
FOLLOWER_S = 5.0  # the leader's report why an engine does not start, before its follower ends
TORCHRUN_S = 600  # the rendezvous of a torchrun's nodes (torch's default); timeout.connect ends the wait sooner

# --- programs that are asked ---
SLURM_S = 30.0  # a command of Slurm
SLURM_STATUS_S = 5.0  # a command of Slurm in `status`; scontrol itself tries for 18 s while slurmctld is down
GPU_QUERY_S = 30.0  # an answer of nvidia-smi and its like
GPU_HEALTH_S = 10.0  # an answer about the health of GPUs; without it the run starts all the same
QUOTA_S = 5.0  # the command that shows a quota
KERNEL_LOCK_S = 20.0  # the lock of a kernel cache that another rank holds
SERVER_RETRY_S = 10.0  # the longest pause between two requests to servers of rewards or environments that do not answer
SERVER_ASKED_S = 3600.0  # the longest pause that a server may ask for (Retry-After)
SERVER_LOOK_S = 1.0  # the pause between two looks of a server whether the client of a call is still connected
SERVER_AWAITED_S = 2.0  # the silence of all such servers, before the run says that it waits for them
SERVER_IDLE_S = 120.0  # the silence of a connection to `serve-reward` or `serve-env`, which is closed then
SERVER_BEAT_S = 5.0  # the pause between two messages of `serve-env` that a call is still running
SERVER_SILENT_S = 30.0  # the silence of `serve-env` after which it counts as gone
EPISODE_IDLE_S = 7200.0  # the time between two turns after which `serve-env` forgets an episode: its run has ended
TASKS_S = 300.0  # the making of all tasks of data.reasoning_gym
MATH_S = 5  # the reading of an answer in mathematics, and its comparison with the label; whole seconds
SANDBOX_S = 10.0  # the unit tests of a response, all together
SANDBOX_PROBE_S = 10.0  # a program that only prints, in a sandbox that may not work

# --- start and end of processes ---
SECOND_TERM_S = 2.0  # a SIGTERM sooner after the first is the same stop; a later one ends the process at once
SIGNAL_HANDLED_S = 0.1  # Python's handler of a signal, which usually runs by then
TORCHRUN_END_S = 3  # the ranks of a torchrun that has to end, before it kills them
STEP_KILL_S = 3.0  # the end of a step's processes after they were killed
REQUEUED_KILL_S = 20.0  # Slurm's SIGTERM to a job that was requeued
REQUEUE_END_S = 60.0  # the end of the tries to requeue, before the end of the allocation
REQUEUE_S = 600.0  # the tries to requeue, where the end of the allocation is not known
RANKS_LEAVE_S = 30.0  # the end of ranks that do not hear the conductor either, before their agent ends them
ENGINE_END_S = 2.0  # a launcher's report how an engine ended whose own ranks have said why
ENGINE_GONE_S = 10.0  # a node's report that an engine's processes are gone; a node that is cut off never sends it
GPU_LEFT_S = 5.0  # the processes of an earlier run that are about to leave a GPU
MPI_S = 60.0  # a message between all processes of an MPI start; waits for work of another process come on top
MPI_CLOSED_S = 10.0  # the end of all ranks, beyond their grace
MPI_LEAVE_S = 600.0  # the common end of an MPI start: the conductor may still ask Slurm to requeue the job

# --- workers: processes that run code of the user's ---
WORKER_STACK_S = 1.0  # the stack of a worker that is too late, or its exit status once its connection is closed
WORKER_LOOK_S = 1.0  # the pause between two looks whether the node of a worker with a call is still connected
WORKER_SILENT_S = 5.0  # the shortest silence of such a node that counts, even if the deadline of a call is shorter
WORKER_END_S = 5.0  # the end of a worker's thread, which kills its processes

# --- preflight ---
CONNECT_S = 3.0  # a connection to another node's port; a port that does not answer counts as not reached
AGENT_S = 60.0  # an agent's answer to a call; most come at once
CANARY_S = 5.0  # a file system that is slow to show a new file
REPORT_S = 1.0  # the reports of the agents, before the time for a measurement is over
GROUP_LEAVE_S = 10.0  # the other ranks of a group that was measured, until they leave it
GROUP_S = {"gloo": 6.0, "nccl": 15.0}  # operations of a group, which begin only if twice as much is left

# --- failures and hangs ---
VERDICT_S = 2.0  # the reports on the reason of a death, which may come from other processes
STACKS_S = 5.0  # the ranks' answer with their stacks, which needs no main thread
LOOK_S = 5.0  # the look of the nodes at their processes from outside
WATCHDOG_ROUND_S = 5.0  # a round of the watchdog's thread: a longer one was a suspension, or wrote a report

# --- weight transfer ---
TRANSFER_DEATH_S = 3.0  # the news that an engine has died, which is the usual reason why a member failed
TRANSFER_SLOW_S = 5.0  # an engine's answer after an update broke off, once all of the actor's ranks have answered
TRANSFER_ABORT_S = 1.0  # one abort of the actor, before the next
POST_S = 3.0  # the survivors' reports in the group's store, after a failure
POST_CLOSED_S = 0.5  # the survivors' reports, once a connection is known to be closed
CLOSING_S = 0.3  # the closing of all connections of a process that died; they close one after the other
GROUP_MARGIN_S = 2.0  # a group's answer beyond timeout.sync
GROUP_REACH_S = 10.0  # the members' connections to each other's ports, while a group is formed
BENCH_SYNC_S = 600.0  # an operation of `slurm-rlhf bench sync`
