"""The command `lapwing`, from its first moment: Ctrl-C while the library is still being imported ends it with a line.

It stands beside the package, as importing any part of that imports torch, which takes seconds.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

STOPPED = 130


def _stop(*_: object) -> NoReturn:
    os.write(2, b"Error: stopped before the end; no unfinished file is left.\n")
    os._exit(STOPPED)  # an import that is cut short leaves nothing to clean up, and may raise anything


def main() -> None:
    before = signal.signal(signal.SIGINT, _stop)
    from lapwing.cli.commands import main as command

    signal.signal(signal.SIGINT, before)
    command()


if __name__ == "__main__":
    main()
