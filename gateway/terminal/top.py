"""`penstock top`: what a gateway does at the moment, told anew each second."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator

import click

from gateway.client import CallFailed
from gateway.terminal.administration import Administration
from gateway.terminal.options import administers
from gateway.terminal.tables import WIDE

AGAIN_S = 1.0
"""Between two attempts to find a gateway that was there before."""


@click.command()
@click.option("--once", is_flag=True, help="One second of it, as text; so it is where the output is no terminal.")
@click.option("--json", "as_json", is_flag=True, help="A line of JSON each second, the way the API has it.")
@administers
def top(admin: Administration, once: bool, as_json: bool) -> None:
    """Watch streams, tenants, classes and workers. q leaves."""
    if as_json:
        admin.follow("live", show=lambda payload: _printed(payload, once))
    elif once or not sys.stdout.isatty():
        admin.follow("live", show=_shown)
    else:
        _watch(admin)


def _watch(admin: Administration) -> None:
    """Until q. A gateway that goes away is waited for."""
    from rich.console import Console
    from rich.live import Live

    from gateway.terminal.view import HISTORY, View

    view, console = View(), Console()
    with _keys() as is_left, Live(console=console, screen=True, auto_refresh=False) as screen:

        def show(payload: bytes) -> bool:
            view.take(payload)
            screen.update(view.drawn(*console.size), refresh=True)
            return not is_left()

        while not is_left():
            try:
                admin.follow("live", show=show, history=HISTORY if view.is_blank else 0)
            except CallFailed as error:
                if view.is_blank:
                    raise
                view.trouble = f"{error}; trying again"
                screen.update(view.drawn(*console.size), refresh=True)
                time.sleep(AGAIN_S)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[], bool]]:
    """Gives what says whether q was typed. The terminal hands over each key as it is typed while this lasts."""
    if not sys.stdin.isatty():
        yield lambda: False
        return
    import termios
    import tty

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    left = False

    def is_left() -> bool:
        nonlocal left
        while not left and select.select([number], [], [], 0)[0]:
            typed = os.read(number, 1024)  # past the buffer of sys.stdin, of which select knows nothing
            left = not typed or b"q" in typed.lower()
        return left

    tty.setcbreak(number)
    try:
        yield is_left
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _printed(payload: bytes, once: bool) -> bool:
    click.echo(payload)
    sys.stdout.flush()
    return not once


def _shown(payload: bytes) -> bool:
    from rich.console import Console

    from gateway.terminal.view import View

    view = View()
    view.take(payload)
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=WIDE)
    console.print(view.drawn(console.width))
    return False
