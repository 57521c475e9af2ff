"""Who may connect: the keys of a run, and the check that a process has them.

CURVE (CurveZMQ, ZeroMQ RFC 26): Curve25519 key pairs, both sides authenticated, everything encrypted. Who can read the
run's key file may talk on its sockets, nobody else can.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket as network
import stat
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message
from zmq.utils.z85 import decode as z85_decode

from slurm_rlhf.errors import ConfigError
from slurm_rlhf.run_directory import files_exhausted, most_files, write_atomically
from slurm_rlhf.wire import timeouts

_MAX_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class RunKeys:
    """Holds the key pairs of the conductor's socket (server) and of all ranks (client), 40 characters of Z85 each."""

    server_public: str
    server_secret: str = field(repr=False)
    client_public: str
    client_secret: str = field(repr=False)

    @classmethod
    def new(cls) -> RunKeys:
        """Make new keys."""
        pairs = (*zmq.curve_keypair(), *zmq.curve_keypair())
        return cls(*(key.decode() for key in pairs))

    @classmethod
    def create(cls, path: Path | str) -> RunKeys:
        """Write new keys to `path` with mode 0600, atomically in place of those of an earlier run."""
        path, keys = Path(path), cls.new()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, keys.text(), durable=True, private=True)
        return keys

    def text(self) -> str:
        """Write them as `parse` reads them."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, path: Path | str) -> RunKeys:
        """Read the keys in `path`. Raises ConfigError when others could read or write the file, or it holds no keys."""
        try:
            # NONBLOCK: opening a named pipe put in the file's place must not hang.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise ConfigError(f"the run's key file {path} cannot be read: {error.strerror}") from error
        with os.fdopen(descriptor, "rb") as file:
            _refuse_foreign(os.fstat(file.fileno()), path)
            content = file.read(_MAX_FILE_BYTES)
        return cls.parse(content, path)

    @classmethod
    def parse(cls, content: str | bytes, origin: Path | str) -> RunKeys:
        """Read keys as `create` writes them. Raises ConfigError naming `origin` if it holds none."""
        try:
            values = json.loads(content)
            keys = cls(**{name.name: str(values[name.name]) for name in fields(cls)})
            for secret, public in (
                (keys.server_secret, keys.server_public),
                (keys.client_secret, keys.client_public),
            ):
                if zmq.curve_public(secret.encode()).decode() != public:
                    raise ValueError("a public key does not belong to its secret key")
        except (ValueError, KeyError, TypeError, zmq.ZMQError) as error:
            raise ConfigError(f"{origin} holds no keys of a run ({error}); start the run anew to replace it") from error
        return keys


def _refuse_foreign(status: os.stat_result, path: Path | str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"the run's key file {path} is not a regular file")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"the run's key file {path} belongs to user {status.st_uid}, not to user {os.geteuid()} who runs this; "
            "use a run_dir of your own"
        )
    if mode := stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"the run's key file {path} is open to other users (mode {stat.S_IMODE(status.st_mode):04o}, "
            f"{mode:03o} too much): its keys may be known; delete it and start the run anew"
        )


log = logging.getLogger(__name__)

# A flood of connections without the key must not keep the thread from the ranks.
_EVENTS_PER_ROUND = 200
_WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_ACCEPT_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_QUIET_MS = 10  # no news for so long means that no connection is being made
_SHARE = 4  # connections whose handshake is not done may take 1 / _SHARE of all descriptors


class Authenticator:
    """Makes a socket a CURVE server, answers its authentication requests (ZAP, ZeroMQ RFC 27), counts refusals.

    Every connection that ends before its handshake has succeeded counts once: a wrong key, no key, and whatever else
    speaks to the port. A refused zmq client that tries again counts again.

    A handshake has 5 s. When too many are pending, the oldest connections that have said nothing are ended: the run
    needs descriptors for its files, and the handshake of a rank takes milliseconds.
    """

    def __init__(self, context: zmq.Context[Any], socket: zmq.Socket[Any], keys: RunKeys) -> None:
        """Call it before `socket` binds; a context has room for one authenticator."""
        self.refused = 0
        self.obstacle = ""
        """Why connections were not accepted; empty: all were."""
        self._pending = 0
        self._most = max(1, most_files() // _SHARE)
        self._unheard: dict[int, None] = {}  # descriptors of connections that brought no message yet, oldest first
        self._other_keys = 0
        self._allowed = z85_decode(keys.client_public)
        self._zap = context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        socket.handshake_ivl = timeouts.HANDSHAKE_MS
        socket.curve_server = True
        socket.curve_secretkey = keys.server_secret.encode()
        socket.curve_publickey = keys.server_public.encode()
        socket.zap_domain = b"slurm_rlhf"
        self._monitor = socket.get_monitor_socket(_WATCHED)
        self._monitored = socket
        self._hand = os.dup(self._zap.fileno())  # own descriptor for a connection that is checked before it is ended

    @property
    def sockets(self) -> list[zmq.Socket[Any]]:
        """Return what the I/O thread polls for reading."""
        return [self._zap, self._monitor]

    def answer(self) -> None:
        """I/O thread: answer and count waiting requests and events, a limited number per call; does not block."""
        for _ in range(_EVENTS_PER_ROUND):
            if not self._zap.poll(0):
                break
            self._answer(self._zap.recv_multipart())
        for _ in range(_EVENTS_PER_ROUND):
            if not self._monitor.poll(0):
                break
            news = parse_monitor_message(self._monitor.recv_multipart())
            self._count(news["event"], news["value"])
        self._end_oldest(min(self._pending, len(self._unheard)) - self._most)

    def heard(self, message: zmq.Frame) -> None:
        """I/O thread: note that a connection is that of a rank."""
        self._unheard.pop(int(message.get(zmq.SRCFD)), None)

    def close(self) -> None:
        """Close the sockets for which the end of the context would wait; call this before `socket` is closed."""
        with contextlib.suppress(zmq.ZMQError):  # it was never bound
            self._monitored.unbind(self._monitored.getsockopt_string(zmq.LAST_ENDPOINT))
        # ZeroMQ without room for its events waits with a lock held, for which `disable_monitor` would wait.
        while self._monitor.poll(_QUIET_MS):
            self._monitor.recv_multipart()
        self._monitored.disable_monitor()
        self._monitor.close(linger=0)
        os.close(self._hand)
        self._zap.close(linger=0)

    def _end_oldest(self, number: int) -> None:
        for descriptor in list(islice(self._unheard, max(0, number))):
            self._refuse(descriptor)
            # ZeroMQ may have closed it by now, and something else may have its number.
            with contextlib.suppress(OSError):
                connection = network.socket(fileno=os.dup2(descriptor, self._hand, inheritable=False))
                port = self._monitored.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
                if connection.getsockname()[1:2] == (int(port),):
                    connection.shutdown(network.SHUT_RDWR)
                connection.detach()
            os.dup2(self._zap.fileno(), self._hand, inheritable=False)

    def _count(self, event: int, value: int) -> None:
        """Count an event; `_pending` are connections that are accepted, not yet admitted and not yet refused.

        Events of failed handshakes would be simpler, but what does not speak ZeroMQ at all (a port scan, a browser)
        only shows as a disconnection, and that event does not tell whether it had been admitted.
        """
        if event == zmq.EVENT_ACCEPTED:
            self._pending += 1
            self._unheard[value] = None
        elif event == zmq.EVENT_ACCEPT_FAILED:
            if value in (errno.EMFILE, errno.ENFILE) and not self.obstacle:
                self.obstacle = f"connections were not accepted: {files_exhausted()}"
                log.warning("control port: %s", self.obstacle)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._pending -= 1
            if self._pending < 0:
                # An admitted peer left during this handshake, and its end was taken for the end of this one.
                self._pending, self.refused = 0, self.refused - 1
        elif value in self._unheard:
            self._refuse(value)

    def _refuse(self, descriptor: int) -> None:
        del self._unheard[descriptor]
        if not self._pending:  # an admitted peer that left before its first message
            return
        self._pending -= 1
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:
            log.warning("refused a connection without the run's key; %d so far", self.refused)

    def _answer(self, request: list[bytes]) -> None:
        _, request_id, _, address, _, mechanism, *credentials = request
        allowed = mechanism == b"CURVE" and credentials == [self._allowed]
        if not allowed:
            self._other_keys += 1
            if self._other_keys & (self._other_keys - 1) == 0:
                log.info(
                    "%s has another key than the run's; %d so far", address.decode("ascii", "replace"), self._other_keys
                )
        code, text = (b"200", b"") if allowed else (b"400", b"not a rank of this run")
        self._zap.send_multipart([b"1.0", request_id, code, text, b"", b""])
