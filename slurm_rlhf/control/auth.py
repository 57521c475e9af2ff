"""Who may connect: holders of the run's client key, nobody else."""

from __future__ import annotations

import logging
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message
from zmq.utils.z85 import decode as z85_decode

from slurm_rlhf.control.keys import RunKeys

log = logging.getLogger(__name__)

# Strangers that knock without end must not keep the thread from the ranks.
_EVENTS_PER_ROUND = 200
_WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Gate:
    """Makes a socket a CURVE server, answers its authentication requests (ZAP, ZeroMQ RFC 27), counts the refused.

    Every connection that ends before its handshake has succeeded counts once: a wrong key, no key, and whatever else
    speaks to the port. A refused zmq client that tries again counts again.
    """

    def __init__(self, context: zmq.Context[Any], socket: zmq.Socket[Any], keys: RunKeys) -> None:
        """Before `socket` binds. The context's authentication is this gate's alone."""
        self.refused = 0
        self._pending = 0
        self._strangers = 0
        self._allowed = z85_decode(keys.client_public)
        self._zap = context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        socket.curve_server = True
        socket.curve_secretkey = keys.server_secret.encode()
        socket.curve_publickey = keys.server_public.encode()
        socket.zap_domain = b"slurm_rlhf"
        self._monitor = socket.get_monitor_socket(_WATCHED)
        self._monitored = socket

    @property
    def sockets(self) -> list[zmq.Socket[Any]]:
        """What the I/O thread polls for reading."""
        return [self._zap, self._monitor]

    def attend(self) -> None:
        """I/O thread: answers and counts what has come, the rest of a flood next time; does not block."""
        for _ in range(_EVENTS_PER_ROUND):
            if not self._zap.poll(0):
                break
            self._answer(self._zap.recv_multipart())
        for _ in range(_EVENTS_PER_ROUND):
            if not self._monitor.poll(0):
                break
            self._count(parse_monitor_message(self._monitor.recv_multipart())["event"])

    def close(self) -> None:
        """Before the socket closes. Leaves nothing open that the end of the context would wait for."""
        self._monitored.disable_monitor()
        self._monitor.close(linger=0)
        self._zap.close(linger=0)

    def _count(self, event: int) -> None:
        """`_pending`: accepted, and neither admitted nor counted as refused.

        Events of failed handshakes would be simpler, but what does not speak ZeroMQ at all (a port scan, a browser)
        only shows as a disconnection, and that event does not tell whether it had been admitted.
        """
        if event == zmq.EVENT_ACCEPTED:
            self._pending += 1
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._pending -= 1
            if self._pending < 0:
                # An admitted peer left during this handshake, and its end was taken for the end of this one.
                self._pending, self.refused = 0, self.refused - 1
        elif self._pending:
            self._pending -= 1
            self.refused += 1
            if self.refused & (self.refused - 1) == 0:
                log.warning("refused a connection without the run's key; %d so far", self.refused)

    def _answer(self, request: list[bytes]) -> None:
        _, request_id, _, address, _, mechanism, *credentials = request
        allowed = mechanism == b"CURVE" and credentials == [self._allowed]
        if not allowed:
            self._strangers += 1
            if self._strangers & (self._strangers - 1) == 0:
                log.info(
                    "%s has another key than the run's; %d so far", address.decode("ascii", "replace"), self._strangers
                )
        code, text = (b"200", b"") if allowed else (b"400", b"not a rank of this run")
        self._zap.send_multipart([b"1.0", request_id, code, text, b"", b""])
