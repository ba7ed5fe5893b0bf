"""What the gateway itself costs: requests/s, added latency and relayed tokens/s of one core, against bare aiohttp.

Run ``python -m benchmarks.gateway``. The whole production gateway runs as its own process on one core; the worker it
talks to is scripted and answers at once over the real wire, from the other core, which it shares with the load. What a
bare aiohttp server does with the same bodies on the same core in the same rounds is the limit; notes and figures are in
benchmarks/gateway.md.
"""
