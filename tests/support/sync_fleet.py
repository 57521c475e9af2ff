"""The test's side of weight updates, all of whose other processes are `sync_peer`s.

`Fleet`: the test's process is the actor's rank 0. `PeerRanks`: it is the conductor, and a role is made of peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from msgspec.structs import asdict
from shaped_links import Links
from sync_peer import Peer, configure, describe, digest, hold, make_weights
from waiting import HANG_S

from slurm_rlhf.errors import RemoteError
from slurm_rlhf.weights.ends import Sender
from slurm_rlhf.weights.group import SyncGroup, join
from slurm_rlhf.weights.lead import WeightSync
from slurm_rlhf.weights.rendezvous import Membership, listen
from slurm_rlhf.weights.transfer_plan import make_plan
from slurm_rlhf.wire.codec import spec_of

BUCKET = 1 << 20


def one_of(gpu: str, place: int = 1) -> dict[str, Any]:
    """The GPUs that a rank sees: its own, of this letter, has the number `place`, and others' are there, too."""
    gpus = ["GPU-other0", "GPU-other1", "GPU-other2"]
    gpus[place] = f"GPU-{gpu}"
    return {"gpus": gpus, "current": place}


class Fleet:
    """The sender's side, receivers that come and go, and one store for all groups that follow each other.

    Receivers that a test leaves alive serve the next one: whatever happened to their group, they join another.
    """

    def __init__(self, warm: bool = True) -> None:
        """`warm`: as of `Peer`; where few are started, the process that forks them costs more than it saves."""
        self.warm = warm
        self.store = listen("127.0.0.1", timeout_s=HANG_S)
        self.peers: list[Peer] = []
        self.spare: list[Peer] = []
        self.names = 0
        self.group: SyncGroup

    def hire(self, receivers: int) -> None:
        missing = receivers - len(self.peers) - len(self.spare)
        fresh = [Peer(warm=self.warm) for _ in range(missing)]
        self.spare += fresh
        for peer in fresh:
            peer.wait_warm()
        while len(self.peers) < receivers:
            self.peers.append(self.spare.pop(0))

    def dismiss(self) -> None:
        for peer in self.peers:
            if peer.fit():
                self.spare.append(peer)
            else:
                peer.end()
        self.peers = []

    def build(self, receivers: int, *, actors: int = 1, nodes: str = "", gpus: str = "", **options: Any) -> SyncGroup:
        """A group of this process, `actors - 1` other actor ranks and `receivers`; `nodes`: a letter for each, `gpus`
        too, where they have stand-ins for GPUs: the test has them in this process, then."""
        self.hire(actors - 1 + receivers)
        self.names += 1
        where = {"name": f"g{self.names}", "world": actors + receivers, "actors": actors}
        where |= {"host": "127.0.0.1", "port": self.store.port, "timeout_s": HANG_S} | options
        at = nodes or "n" * (actors + receivers)
        for rank, peer in enumerate(self.peers, 1):
            if gpus:
                peer.tell("see", **one_of(gpus[rank], 1 if rank < actors else 2))
                assert peer.answer() is None
            label = f"actor {rank}" if rank < actors else f"rollout {rank - actors}"
            peer.tell("join", rank=rank, label=label, node=at[rank], **where)
        self.group = join(Membership(rank=0, label="actor 0", node=at[0], **where))
        for peer in self.peers:
            assert peer.answer() == [str(member) for member in self.group.members]
        return self.group

    def sender(
        self,
        receivers: int,
        *,
        layers: int = 12,
        actors: int = 1,
        zero: int = 0,
        bucket: int = BUCKET,
        **options: Any,
    ) -> Sender:
        group = self.build(receivers, actors=actors, **options)
        parameters = describe(make_weights(0, layers))
        for peer in self.peers[: actors - 1]:
            peer.tell("sender_of", parameters=parameters, bucket=bucket, zero=zero)
        for peer in self.peers[actors - 1 :]:
            peer.tell("receiver_of", parameters=parameters, bucket=bucket, zero=zero)
        sender = Sender(group, make_plan(parameters, bucket, group.layout(zero)))
        for peer in self.peers:
            assert peer.answer() == len(sender.plan.buckets)
        return sender

    def update(self, sender: Sender, version: int, layers: int = 12) -> None:
        """Update all once, and compare byte for byte."""
        actors = sender.group.actors
        for peer in self.peers[: actors - 1]:
            peer.tell("push", version=version, seed=version, layers=layers)
        for peer in self.peers[actors - 1 :]:
            peer.tell("update", version=version)
        weights = make_weights(version, layers)
        zero = sender.plan.layout.zero_stage == 3
        stats = sender.push(hold(weights, 0, actors if zero else 1), version)
        assert stats.nbytes == sender.plan.payload
        answers = [peer.answer() for peer in self.peers]
        assert all(answer["nbytes"] == stats.nbytes for answer in answers[: actors - 1])
        sent = {name: digest(tensor) for name, tensor in weights}
        assert all(answer == sent for answer in answers[actors - 1 :])

    def end(self, gently: bool = False) -> None:
        """`gently`: they may do what they do at exit, save their coverage."""
        for peer in self.peers + self.spare if gently else ():
            peer.leave()
        for peer in self.peers + self.spare:
            peer.end()


class PeerRanks:
    """A role whose ranks are `sync_peer`s: what `RoleHandle` and `EngineHandle` are for the conductor."""

    width = 1  # ranks of an engine

    def __init__(self, peers: Sequence[Peer]) -> None:
        self.peers = peers
        self.world = len(peers)
        self._threads = [ThreadPoolExecutor(1) for _ in peers]  # calls of a rank come after each other

    def tell(self, rank: int, command: str, /, **args: Any) -> Any:
        """Have a rank do something that is no call of its role."""
        return self._threads[rank].submit(self._ask, self.peers[rank], command, args).result()

    def call(self, rank: int, method: Any, argument: Any, /) -> Future[Any]:
        result = spec_of(method).result
        return self._threads[rank].submit(self._ask, self.peers[rank], method.__name__, _plain(argument), result)

    def start_all(self, method: Any, argument: Any, /) -> list[Future[Any]]:
        return [self.call(rank, method, argument) for rank in range(self.world)]

    def start_each(self, method: Any, arguments: Sequence[Any], /) -> list[Future[Any]]:
        return [self.call(rank, method, argument) for rank, argument in enumerate(arguments)]

    def goes_on_without(self, engine: int, error: BaseException) -> bool:
        """Whether the run does: here no engine is started again."""
        return False

    def _ask(self, peer: Peer, method: str, args: dict[str, Any], result: Any = None) -> Any:
        peer.tell(method, **args)
        answer = peer.answer()
        if isinstance(answer, dict) and "error" in answer:
            raise RemoteError(f"{method} failed: {answer['error']}: {answer['message']}")
        if not isinstance(answer, dict) or result is None:
            return answer
        return result(**{name: answer[name] for name in result.__struct_fields__ if name in answer})


@contextmanager
def peers_in_roles(
    actors: int, engines: int, links: Links | None = None, nodes: Sequence[str] = ()
) -> Iterator[tuple[PeerRanks, PeerRanks]]:
    """Yield ranks in the roles of actor and engines; `nodes`: the node of each, among those of `links`."""
    made = [Peer(links.inside(node), node) for node in nodes] if links else [Peer() for _ in range(actors + engines)]
    try:
        for peer in made:
            peer.wait_warm()
        yield PeerRanks(made[:actors]), PeerRanks(made[actors:])
    finally:
        for peer in made:
            peer.end()


def conducted(roles: tuple[PeerRanks, PeerRanks], host: str = "127.0.0.1", **settings: Any) -> WeightSync:
    """Give ranks the roles that a run's conductor gives them; the actor's ranks hold shards."""
    settings = {"timeout.sync": HANG_S, "sync.bucket_mb": 1, "ds.zero_stage": 3} | settings
    for role, ranks in zip(("actor", "rollout"), roles, strict=True):
        for rank in range(ranks.world):
            ranks.tell(rank, "become", role=role, rank=rank, settings=settings)
    return WeightSync(configure(settings), *roles, host)  # type: ignore[arg-type]


def _plain(argument: Any) -> dict[str, Any]:
    """List the fields that say something, as `weight_sync.endpoints` takes them."""
    if isinstance(argument, int | str):
        return {"version" if isinstance(argument, int) else "host": argument}
    return {name: value for name, value in asdict(argument).items() if value is not None}


def loaded(weights: WeightSync, engine: int) -> dict[str, str]:
    return weights.rollout.tell(engine, "weights_loaded")


def sent(version: int) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in make_weights(version)}
