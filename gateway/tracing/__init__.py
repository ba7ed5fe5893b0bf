"""Traces: what each request spent its time on, as spans for whoever collects them.

Of every request the instants are noted (``gateway.journey``), which costs next to nothing. When it is over ``tracer``
decides whether it is worth a trace (``keeping``): chosen at its beginning, or for what became of it. What is kept
goes to a process of its own (``sender``), which makes the spans (``spans``, by the names in ``names``) and hands them
to the collector (``collector``). A collector that is dead, slow or silent costs spans, and they are counted.

While tracing is off none of it is loaded but ``order``, which says so.
"""
