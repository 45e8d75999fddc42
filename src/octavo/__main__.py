"""`octavo`, and `python -m octavo`: the way into the command line.

Nothing is imported before `main` runs, so that Ctrl-C during the first tenth of a second, while click and the commands
load, ends as it does later.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line of this process and exit with its code."""
    try:
        from octavo.cli.main import main as run_command_line  # noqa: PLC0415 - as said above

        run_command_line()
    except KeyboardInterrupt:
        if sys.stderr is not None:
            print("interrupted", file=sys.stderr)  # noqa: T201 - click may not be there yet
        sys.exit(130)


if __name__ == "__main__":
    main()
