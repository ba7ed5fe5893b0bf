"""What goes wrong with an adapter's files."""


class AdapterError(Exception):
    """This adapter cannot be used; the message is one sentence that names it and says why."""
