"""The administration from a terminal: commands over the admin API of a running gateway, here or elsewhere.

Each prints a table for people or, with ``--json``, what the API answered. Nothing of the server imports this.
"""
