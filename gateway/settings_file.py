"""config.toml, read once for the command that asks; what is wrong with it is one sentence and the end."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from policies import configuration, settings

BAD_START = 2
"""Exit status when what was asked cannot begin: nothing was served, and one sentence says why."""

config_option = click.option(
    "--config", type=click.Path(path_type=Path), help="Settings [./config.toml if there is one, else the defaults]."
)
data_dir_option = click.option("--data-dir", help="Where the store and the first keys are kept [store.data_dir].")


def load(config: Path | None, overrides: dict[str, Any]) -> settings.Settings:
    """From ``config`` or ./config.toml, the environment, and ``overrides`` ({"server.port": 9000}); the last wins."""
    path = config or Path("config.toml")
    try:
        text = path.read_text("utf-8-sig")  # editors on Windows begin with a mark, which TOML does not have
    except FileNotFoundError:
        if config is not None:
            fail(f"there is no file {config}")
        text = ""
    except OSError as error:
        fail(f"{path} cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        fail(f"{path} cannot be read: it is not UTF-8 text")
    for name, meant in configuration.misspelt(os.environ):
        click.echo(f"penstock: {name} sets nothing; {meant} does", err=True)
    try:
        return configuration.load(text, os.environ, overrides, str(path))
    except configuration.SettingsError as error:
        fail(str(error))


def fail(sentence: str) -> NoReturn:
    click.echo(f"penstock: {sentence}", err=True)
    sys.exit(BAD_START)
