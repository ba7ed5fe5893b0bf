"""What gateway and worker agree on: words, messages, decisions.

Nothing here waits, opens a file or reads a clock; time is an argument.
The package knows the standard library and msgspec alone.
"""
