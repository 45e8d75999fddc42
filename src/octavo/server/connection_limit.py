"""ConnectionLimit: how many connections there may be, and what happens to those beyond.

up to `max_connections`    taken
up to SPARE more           answered 503, but for /health, and closed
beyond                     closed at once

Before one is turned away, the connection that has been idle for longest makes room: it is open only in case its client
has another question.
"""

from __future__ import annotations

import logging
import resource
from typing import Protocol

from octavo.errors import InvalidParameterError

SPARE = 64
"""Connections that are told that there are too many."""
MORE_THAN_WAIT = 1024
"""Connections beyond the requests that may wait, unless told: for those that are computed, for pages and for probes."""
OTHER_FILES = 128
"""What the process has open besides connections: the model, the log, libraries, and room to look into."""
_LOG = logging.getLogger(__name__)


class Idle(Protocol):
    """A connection without a request."""

    def close_idle(self) -> None: ...


class ConnectionLimit:
    """The limit of one server; for its event loop.

    Args:
        max_connections: Taken at a time.
    """

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self._idle: dict[Idle, None] = {}
        self._has_told = False

    def note_idle(self, connection: Idle) -> None:
        """Say that a connection waits for its client's next request."""
        self._idle[connection] = None

    def note_busy(self, connection: Idle) -> None:
        """Say that a connection waits no longer, or is gone."""
        self._idle.pop(connection, None)

    def is_beyond(self, num_connections: int) -> bool:
        """Return whether the newest of so many connections is one too many; an idle one may make room for it.

        Mutates: closes that idle one.
        """
        if num_connections <= self.max_connections:
            self._has_told = self._has_told and num_connections > self.max_connections * 0.9
            return False
        if self._idle:
            next(iter(self._idle)).close_idle()
            return False
        if not self._has_told:
            self._has_told = True
            _LOG.warning("%d connections are open: more are turned away (--max-connections)", self.max_connections)
        return True

    def is_far_beyond(self, num_connections: int) -> bool:
        """Return whether there are too many to tell them so."""
        return num_connections > self.max_connections + SPARE


def resolve_max_connections(asked: int | None, *, max_waiting: int) -> int:
    """Return how many connections are taken, and let the process have as many files open.

    Raises:
        InvalidParameterError: the system does not allow so many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = SPARE + OTHER_FILES
    wanted = (max_waiting + MORE_THAN_WAIT if asked is None else asked) + others
    if hard != resource.RLIM_INFINITY and wanted > hard:
        if asked is not None:
            raise InvalidParameterError(
                f"{asked:,} connections need {wanted:,} open files, {hard:,} are allowed",
                param="max_connections",
                because="that is the hard limit of this process",
                hints=(f"`ulimit -Hn {wanted}` before the start, as root", f"at most {max(1, hard - others)} fit"),
            )
        wanted = hard
        _LOG.info("%d connections are taken: the process may open %d files", max(1, wanted - others), hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(1, wanted - others)
