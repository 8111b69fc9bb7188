"""The address of a server, taken before torch is loaded."""

from __future__ import annotations

import socket

from rlhf_data import UserError
from rlhf_serve.settings import ServeSettings


def bound(settings: ServeSettings) -> socket.socket:
    """A socket that is bound to the server's address, and does not listen yet.

    Raises:
        UserError: the address is taken, or does not belong to this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # With TCP named, asyncio turns off Nagle's algorithm, which would cost 40 ms per answer.
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise UserError(
            f"{settings.host} port {settings.port} cannot be listened on ({error.strerror or error}); choose "
            "another --port, or 0 for a free one",
            code="port_taken",
        ) from error
    return listener
