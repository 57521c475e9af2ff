"""The keys of one run: who holds the file may talk on the run's sockets, nobody else can.

CURVE (CurveZMQ, ZeroMQ RFC 26): Curve25519 key pairs, both sides authenticated, everything encrypted.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import zmq

from slurm_rlhf.atomic_write import write_atomically
from slurm_rlhf.errors import ConfigError

_MAX_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class RunKeys:
    """Key pairs of the conductor's socket (server) and of all ranks (client), 40 characters of Z85 each."""

    server_public: str
    server_secret: str = field(repr=False)
    client_public: str
    client_secret: str = field(repr=False)

    @classmethod
    def create(cls, path: Path | str) -> RunKeys:
        """New keys, written to `path` with mode 0600; the keys of an earlier run there are replaced atomically."""
        path = Path(path)
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        keys = cls(*(key.decode() for key in (server_public, server_secret, client_public, client_secret)))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(keys)), durable=True, private=True)
        return keys

    @classmethod
    def load(cls, path: Path | str) -> RunKeys:
        """The keys in `path`. Raises ConfigError when others could read or write the file, or it holds no keys."""
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
        """The keys as `create` writes them. Raises ConfigError naming `origin` when these are none."""
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
