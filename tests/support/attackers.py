"""Who attacks a run's control port, for tests: strangers with bytes of all kinds, a holder of the key with nonsense."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable

import zmq
from intruders import GREETING, send

from slurm_rlhf.wire.auth import RunKeys
from slurm_rlhf.wire.codec import encode
from slurm_rlhf.wire.messages import Envelope, unpack

SHARES = {"fuzzed": 40, "truncated": 25, "replayed": 25, "wrong key": 5, "nonsense": 5}
"""Of a hundred messages."""
PAUSE_S = 0.001


class Fire:
    """`with Fire(...) as fire:` attacks from several threads until the block ends; `sent` counts what of each kind.

    From `probe` on it also measures how soon the conductor answers.
    """

    def __init__(self, endpoint: str, keys: RunKeys, recorded: list[bytes], role: str, world: int) -> None:
        self.sent: Counter[str] = Counter()
        self.latencies: list[float] = []
        """Seconds from a hello to the conductor's answer, since `probe`."""
        self._endpoint = endpoint
        self._keys, self._recorded = keys, recorded
        self._hello = {"role": role, "rank": 0, "world": world, "host": "elsewhere", "pid": 1, "start": 0}
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.linger = 0
        self._threads = [threading.Thread(target=self._attack, args=(seed,), daemon=True) for seed in range(3)]

    @property
    def total(self) -> int:
        return sum(self.sent.values())

    def __enter__(self) -> Fire:
        for thread in self._threads:
            thread.start()
        return self

    def probe(self) -> None:
        """Rank 0 is there."""
        self._threads.append(threading.Thread(target=self._probe, daemon=True))
        self._threads[-1].start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._context.destroy(linger=0)

    def _attack(self, seed: int) -> None:
        dice = random.Random(seed)
        insider = self._dealer(self._keys.server_public, self._keys)
        deeds: dict[str, Callable[[random.Random], bool]] = {
            "fuzzed": self._fuzz,
            "truncated": self._truncate,
            "replayed": self._replay,
            "wrong key": self._forge,
            "nonsense": lambda dice: self._babble(dice, insider),
        }
        for kind in dice.choices(list(SHARES), list(SHARES.values()), k=1_000_000):
            if self._over.wait(PAUSE_S):
                break
            if deeds[kind](dice):
                with self._lock:
                    self.sent[kind] += 1
        insider.close()

    def _probe(self) -> None:
        """A hello of a taken rank is answered at once, unless the conductor's I/O thread is held up."""
        dealer = self._dealer(self._keys.server_public, self._keys)
        while not self._over.wait(0.1):
            began = time.monotonic()
            _post(dealer, [Envelope("hello", 0).pack(), *map(bytes, encode(self._hello))])
            while not dealer.poll(100) and not self._over.is_set():
                pass
            if self._over.is_set() or unpack(dealer.recv_multipart())[0].kind != "taken":
                break  # the rank has left: the run is over
            self.latencies.append(time.monotonic() - began)
        dealer.close()

    def _fuzz(self, dice: random.Random) -> bool:
        """Random bytes, some of them behind a greeting that the port understands."""
        return send(self._endpoint, dice.choice([b"", GREETING, GREETING[: dice.randrange(64)]]) + dice.randbytes(300))

    def _truncate(self, dice: random.Random) -> bool:
        stream = dice.choice(self._recorded)
        return send(self._endpoint, stream[: dice.randrange(1, len(stream))])

    def _replay(self, dice: random.Random) -> bool:
        return send(self._endpoint, dice.choice(self._recorded))

    def _forge(self, dice: random.Random) -> bool:
        """A whole client with a key of its own, with the server's key wrong, or with neither."""
        other = RunKeys(*(key.decode() for pair in (zmq.curve_keypair(), zmq.curve_keypair()) for key in pair))
        server_key, client = dice.choice(
            [(self._keys.server_public, other), (other.server_public, self._keys), ("", None)]
        )
        dealer = self._dealer(server_key, client)
        sent = _post(dealer, [Envelope("hello", 0).pack(), *map(bytes, encode(self._hello))])
        time.sleep(0.02)
        dealer.close()
        return sent

    def _babble(self, dice: random.Random, insider: zmq.Socket[bytes]) -> bool:
        """With the run's key: frames that are none, and messages in the name of a rank whose connection this is not."""
        reply = [Envelope("reply", dice.randrange(9), dice.randrange(50)).pack(), *map(bytes, encode({"x": 1}))]
        return _post(insider, dice.choice([[dice.randbytes(dice.randrange(1, 200))], [b"\xc1"] * 3, reply]))

    def _dealer(self, server_key: str, client: RunKeys | None) -> zmq.Socket[bytes]:
        dealer = self._context.socket(zmq.DEALER)
        dealer.reconnect_ivl = 10_000  # one attempt each
        if client is not None:
            dealer.curve_serverkey = server_key.encode()
            dealer.curve_publickey = client.client_public.encode()
            dealer.curve_secretkey = client.client_secret.encode()
        dealer.connect(self._endpoint)
        return dealer


def _post(dealer: zmq.Socket[bytes], frames: list[bytes]) -> bool:
    """False when the run is over, so that nobody takes it."""
    try:
        dealer.send_multipart(frames, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def counted(log: str) -> dict[str, int]:
    """What the conductor wrote about its control port when it closed it."""
    (line,) = [line for line in log.splitlines() if "control port:" in line]
    words = line.partition("control port: ")[2].split(", ")
    return dict(_count(word) for word in words)


def _count(word: str) -> tuple[str, int]:
    number, _, name = word.partition(" ")
    return name, int(number)
