"""Commands for a terminal: the administration over the admin API of a running gateway, here or elsewhere, or in its
store; and a chat.

Those of the administration print a table for people or, with ``--json``, what the API answered. Nothing of the server
imports this.
"""
