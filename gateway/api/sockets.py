"""GET /v1/responses: a WebSocket, over which responses are asked for one after the other, and side by side."""

from __future__ import annotations

import contextlib

from aiohttp import WSCloseCode, WSMsgType, hdrs, web

from gateway import errors, failures, head
from gateway.api.responses import SCOPE
from gateway.house import GATEWAY
from gateway.sockets import events
from gateway.sockets.connection import PATH, Connection

CLOSE_S = 3.0
"""How long a client may take to say that it has heard of the end."""
UNLIMITED = 1 << 62
"""What is written ahead of the client is bounded elsewhere."""


async def connect(request: web.Request) -> web.StreamResponse:
    gw = request.app[GATEWAY]
    if request.headers.get(hdrs.UPGRADE, "").strip().lower() != "websocket":
        raise errors.MethodNotAllowed(
            f"Not allowed to {request.method} on {PATH} (it takes POST, and WebSockets)", allowed="POST"
        )
    caller = gw.auth.caller_for(SCOPE, request)
    if gw.dispatch.draining:
        raise errors.Draining("This server is shutting down.", retry_after_s=1.0)
    with gw.sockets.room(caller.tenant_id):
        socket = web.WebSocketResponse(
            timeout=CLOSE_S,
            autoping=False,
            compress=False,
            max_msg_size=gw.settings.server.max_body_bytes,
            writer_limit=UNLIMITED,
            decode_text=False,
        )
        head.add_headers(request, socket)
        try:
            await socket.prepare(request)
        except web.HTTPBadRequest as error:
            raise errors.InvalidRequest(
                f"This is no handshake of a WebSocket: {(error.text or '').rstrip(': ')}"
            ) from None
        request[head.HEAD].left_as = socket.status
        assert gw.sockets.answer is not None
        connection = Connection(gw, request, socket, gw.sockets.answer)
        try:
            with gw.sockets.watched(connection):
                await connection.run()
        except Exception as error:  # an answer of HTTP is no message of a socket
            noted = request[head.HEAD]
            failure = failures.described(error, noted.request_id, noted.trace_if_it_fails)
            noted.failed(failure)
            with contextlib.suppress(ConnectionResetError):
                await socket.send_frame(events.refused(failure), WSMsgType.TEXT)
            await socket.close(code=WSCloseCode.INTERNAL_ERROR)
    return socket
