"""Who may connect: holders of the run's client key, nobody else."""

from __future__ import annotations

import logging
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message
from zmq.utils.z85 import decode as z85_decode

from slurm_rlhf.control.keys import RunKeys

log = logging.getLogger(__name__)

_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Gate:
    """Makes a socket a CURVE server, answers its authentication requests (ZAP, ZeroMQ RFC 27), counts the refused.

    Every failed handshake counts once: a wrong key, no key, and whatever else spoke to the port. A refused zmq client
    that tries again counts again.
    """

    def __init__(self, context: zmq.Context[Any], socket: zmq.Socket[Any], keys: RunKeys) -> None:
        """Before `socket` binds. The context's authentication is this gate's alone."""
        self.refused = 0
        self._allowed = z85_decode(keys.client_public)
        self._zap = context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        socket.curve_server = True
        socket.curve_secretkey = keys.server_secret.encode()
        socket.curve_publickey = keys.server_public.encode()
        socket.zap_domain = b"slurm_rlhf"
        self._monitor = socket.get_monitor_socket(_HANDSHAKE_FAILED)
        self._monitored = socket

    @property
    def sockets(self) -> list[zmq.Socket[Any]]:
        """What the I/O thread polls for reading."""
        return [self._zap, self._monitor]

    def attend(self) -> None:
        """I/O thread: answers and counts what has come; does not block."""
        while self._zap.poll(0):
            self._answer(self._zap.recv_multipart())
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            self.refused += 1
            if self.refused & (self.refused - 1) == 0:
                name = zmq.Event(event["event"]).name
                log.warning("refused a connection without the run's key (%s); %d so far", name, self.refused)

    def close(self) -> None:
        """Before the socket closes. Leaves nothing open that the end of the context would wait for."""
        self._monitored.disable_monitor()
        self._monitor.close(linger=0)
        self._zap.close(linger=0)

    def _answer(self, request: list[bytes]) -> None:
        _, request_id, _, address, _, mechanism, *credentials = request
        allowed = mechanism == b"CURVE" and credentials == [self._allowed]
        if not allowed:
            log.info("%s has another key than the run's", address.decode(errors="replace"))
        code, text = (b"200", b"") if allowed else (b"400", b"not a rank of this run")
        self._zap.send_multipart([b"1.0", request_id, code, text, b"", b""])
