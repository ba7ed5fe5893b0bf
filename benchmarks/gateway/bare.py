"""The limits: aiohttp on uvloop with as little around it as there can be, as one process to be measured.

Run ``python -m benchmarks.gateway.bare ANSWER CHUNK UPSTREAM``, two files and an address. /echo reads a request and
answers with the bytes of ANSWER. /proxy forwards it to UPSTREAM and the answer back. /stream?n=N writes the bytes of
CHUNK, an event, N times. /paced?n=N does so one turn of the loop at a time, as tokens come: a write in each turn is a
system call each, where the plain loop's writes flow together.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvloop
from aiohttp import ClientSession, TCPConnector, web


async def serve(answer: bytes, chunk: bytes, upstream: str) -> None:
    """Until it is terminated; prints its address."""
    session = ClientSession(connector=TCPConnector(limit=0))

    async def echo(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=answer, content_type="application/json")

    async def proxy(request: web.Request) -> web.Response:
        async with session.post(upstream, data=await request.read()) as response:
            return web.Response(body=await response.read(), content_type="application/json")

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await request.read()
        await response.prepare(request)
        paced = request.path == "/paced"
        for _ in range(int(request.query["n"])):
            await response.write(chunk)
            if paced:
                await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    app = web.Application()
    app.router.add_post("/echo", echo)
    app.router.add_post("/proxy", proxy)
    app.router.add_post("/stream", stream)
    app.router.add_post("/paced", stream)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"bare aiohttp ready on http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]).read_bytes(), Path(sys.argv[2]).read_bytes(), sys.argv[3]))
