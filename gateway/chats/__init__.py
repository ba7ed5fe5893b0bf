"""Chat completions that are kept: for ``store``, and found again by whoever asked for them.

A kept one takes the way of every other (``gateway/api/chat.py``); what is its own is that all it said is still there at
the end (``answer``), and where it lies afterwards (``shelf``). Where the shapes (``shapes``) were read: openai-python's
``src/openai/types/chat``.
"""
