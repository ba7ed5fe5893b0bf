"""`python -m worker.bench`, which is `penstock bench engine`."""

from __future__ import annotations

from worker.process import prepare

if __name__ == "__main__":
    prepare()
    from worker.bench.command import main

    main(prog_name="penstock bench engine")
