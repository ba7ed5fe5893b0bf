"""``python -m gateway`` is ``penstock``."""

from gateway.cli import main

main(prog_name="penstock")
