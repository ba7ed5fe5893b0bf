"""The ``penstock`` command. Each subcommand is imported when it is called, so that none pays for the others."""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module

import click

SUBCOMMANDS = {
    "admin-key": "gateway.terminal.admin_key:admin_key",
    "bench": "gateway.bench.command:bench",
    "chat": "gateway.terminal.chat:chat",
    "completion": "gateway.terminal.completion:completion",
    "doctor": "gateway.doctor:doctor",
    "export": "gateway.exports.command:export",
    "keys": "gateway.terminal.keys:keys",
    "ledger": "gateway.terminal.ledger:ledger",
    "migrate": "gateway.starting:migrate",
    "models": "gateway.terminal.workers:models",
    "policies": "gateway.terminal.policies:policies",
    "pull": "gateway.pull:command",
    "requests": "gateway.terminal.usage:requests",
    "serve": "gateway.starting:serve",
    "tenants": "gateway.terminal.tenants:tenants",
    "top": "gateway.terminal.top:top",
    "usage": "gateway.terminal.usage:usage",
    "worker": "gateway.starting:worker",
    "workers": "gateway.terminal.workers:workers",
}


class Commands(click.Group):
    """Knows its commands by name."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in SUBCOMMANDS:
            return None
        module, _, attribute = SUBCOMMANDS[name].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command


def show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from importlib import metadata  # which knows of mails and archives

        try:
            click.echo(f"penstock {metadata.version('penstock')}")
        except metadata.PackageNotFoundError:
            click.echo("penstock, from a source tree that is not installed")
        context.exit()


def _have_standard_streams() -> None:
    """Where whoever started this has closed some, the next files that are opened, such as a socket, would be taken for
    them: by what is logged, and by processes that are started."""
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # it becomes the lowest that is free
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=show_version, help="Say which one."
)
def main() -> None:
    """An OpenAI-compatible LLM gateway with its inference engine in the box."""
    _have_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names and answers have characters that a terminal's encoding may not
