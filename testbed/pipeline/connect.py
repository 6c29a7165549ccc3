"""Set up the connections between neighbouring stages: the later stage listens, the earlier one connects."""

from __future__ import annotations

import socket
import time

from testbed.errors import StageError, TransportError
from testbed.pipeline.job import Endpoint

_RETRY_S = 0.02


def listen(endpoint: Endpoint, name: str) -> socket.socket:
    """Listen for one neighbour. StageError names the address when that is not possible."""
    try:
        # reuse_address: connections of the job before this one may still be in TIME_WAIT
        return socket.create_server((endpoint.address, endpoint.port), backlog=1)
    except OSError as error:
        raise StageError(f"{name} cannot listen on {endpoint}: {error.strerror}") from None


def accept(listener: socket.socket, name: str, timeout_s: float) -> socket.socket:
    """The neighbour's connection; the listener is closed. TransportError when none comes in time."""
    with listener:
        listener.settimeout(timeout_s)
        try:
            return listener.accept()[0]
        except TimeoutError:
            raise TransportError(f"{name}: the earlier stage did not connect within {timeout_s:g} s") from None


def connect(endpoint: Endpoint, name: str, timeout_s: float) -> socket.socket:
    """Connect to the neighbour, trying again while it does not listen yet. TransportError when it cannot be reached in time."""
    deadline = time.monotonic() + timeout_s
    reason = "no time was given"
    while (left := deadline - time.monotonic()) > 0:
        try:
            return socket.create_connection((endpoint.address, endpoint.port), timeout=left)
        except ConnectionRefusedError as error:
            reason = str(error.strerror)
            time.sleep(min(_RETRY_S, left))
        except OSError as error:
            raise TransportError(
                f"{name}: cannot reach the later stage at {endpoint}: {error.strerror or error}"
            ) from None
    raise TransportError(f"{name}: the later stage did not listen on {endpoint} within {timeout_s:g} s ({reason})")
