"""`octavo`: the top command, and the one place where errors become messages and exit codes.

    0 ok    1 failed    2 usage    3 does not fit    130 interrupted

stdout is data, stderr is everything else. With `--json`, an error is a document on stdout too (`octavo.error/1`), so
that a program never has to read prose.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import click

from octavo.cli.command import CONTEXT, LazyCommand, NoSuchCommand, OctavoGroup
from octavo.cli.options import REFUSED_FLAGS
from octavo.errors import CapacityError, MachineError, OctavoError
from octavo.version import __version__

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_WRITE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})

COMMANDS = {
    "generate": LazyCommand("octavo.cli.generate", "Answer prompts, streaming to the terminal"),
    "chat": LazyCommand("octavo.cli.chat", "Talk with a model, turn by turn"),
    "serve": LazyCommand(
        "octavo.cli.serve", "Serve a model over HTTP, for OpenAI's clients and the ones made like them"
    ),
    "top": LazyCommand("octavo.cli.top", "Show the KV pool of a running server, its requests and the last minute"),
    "plan": LazyCommand("octavo.cli.plan", "Say how many requests fit, before anything is downloaded or bought"),
    "simulate": LazyCommand("octavo.cli.simulate", "Run a request trace against a model of the machine"),
    "bench": LazyCommand("octavo.cli.bench", "Measure speed on this machine"),
    "eval": LazyCommand("octavo.cli.eval", "Measure quality on text"),
    "pull": LazyCommand("octavo.cli.pull", "Fetch a model, so that it is there offline"),
    "doctor": LazyCommand("octavo.cli.doctor", "Show the machine, its limits, and what would be chosen and why"),
}


def version_text() -> str:
    """Return package version, native build and kernel backend, in one line each."""
    try:
        from octavo.runtime import _native

        native, kernels = "built", _native.isa_name("auto")
    except ImportError as error:
        native, kernels = f"missing ({error})", "NumPy reference"
    python = ".".join(str(part) for part in sys.version_info[:3])
    return f"octavo {__version__}\nnative module: {native}\nkernels: {kernels}\npython: {python}"


def _show_version(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(version_text())
        ctx.exit()


@click.group(
    "octavo",
    cls=OctavoGroup,
    lazy=COMMANDS,
    context_settings=CONTEXT,
    examples=("octavo generate -p 'The capital of France is'", "octavo pull smollm2-135m", "octavo doctor"),
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show version, native build and kernels",
)
def octavo() -> None:
    """Serve language models from a paged KV cache, on the machine you own."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line and exit with its code."""
    args = list(sys.argv[1:] if argv is None else argv)
    sys.exit(run(args))


def run(args: list[str]) -> int:
    """Run a command line and return its exit code; never raises, never shows a traceback for a user's mistake."""
    try:
        _open_missing_streams()
        code = _answer(args)
        sys.stdout.flush()  # what is still buffered may fail to be written too, and at exit it would be too late to say
    except BrokenPipeError:
        # The reader (`| head`) has seen enough.
        _discard_stdout()
        return 1
    except OSError as error:
        _discard_stdout()
        unwritten = MachineError(f"cannot write the output: {error.strerror or error}")
        with contextlib.suppress(OSError):  # stderr may be what cannot be written
            _report_error(unwritten, is_json=False)
        return unwritten.exit_code
    return code


def _answer(args: list[str]) -> int:
    """As `run`, but an output that cannot be written is raised, as `OSError`."""
    is_json = "--json" in args
    try:
        code = octavo.main(args, prog_name="octavo", standalone_mode=False)
    except OctavoError as error:
        _report_error(error, is_json=is_json)
        return error.exit_code
    except MemoryError:
        refused = CapacityError(
            "the system refused to give more memory",
            because="a limit on this process, or on the machine's memory, was reached",
            hints=("raise the limit, or use a smaller model or `--kv-cache-memory`",),
        )
        _report_error(refused, is_json=is_json)
        return refused.exit_code
    except click.ClickException as error:
        message, hints = _usage_words(error)
        text = "\n".join([f"error[usage]: {message}", *(f"hint: {hint}" for hint in hints)])
        _report(text, code="usage", message=message, hints=hints, is_json=is_json)
        return EXIT_USAGE
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)  # on a line of its own: click has ended the one that shows ^C
        return EXIT_INTERRUPTED
    except Exception as error:
        # A file that fails has a name; what fails without one is a stream.
        if isinstance(error, OSError) and error.filename is None and error.errno in {errno.EPIPE, *_WRITE_ERRORS}:
            raise
        # The last line of defence names the bug instead of dumping it.
        message = f"{type(error).__name__}: {error}"
        text = f"error[internal]: {message}\n  because of a bug in Octavo, not of your input\n{_frames(error)}"
        _report(text, code="internal", message=message, is_json=is_json)
        return 1
    return code if isinstance(code, int) else 0  # `ctx.exit(3)` comes back as a value


def _open_missing_streams() -> None:
    """Give streams that the caller closed (`2>&-`) something harmless to be.

    Raises:
        OSError: stdout is closed, and the answer would go nowhere.
    """
    # In the order of their descriptors, since an opened file takes the lowest that is free.
    if sys.stdin is None:
        sys.stdin = Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115 - for as long as the process
    if sys.stdout is None:
        raise OSError(errno.EBADF, "stdout is closed")
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - as above


def _discard_stdout() -> None:
    """Point stdout at nothing, or Python would complain once more when it flushes what is buffered at exit."""
    if sys.stdout is not None:
        with contextlib.suppress(OSError):  # a stream that a test put there has no descriptor
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report_error(error: OctavoError, *, is_json: bool) -> None:
    _report(error.render(), code=error.code, message=error.message, hints=error.hints, is_json=is_json)


def _report(text: str, *, code: str, message: str, hints: Sequence[str] = (), is_json: bool) -> None:
    if is_json:
        error = {"code": code, "message": message, "hints": list(hints)}
        click.echo(json.dumps({"schema": "octavo.error/1", "error": error}))
    # Names out of files stand in messages, and must not steer the terminal.
    text = "".join(each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}" for each in text)
    if sys.stderr is not None and sys.stderr.isatty() and "NO_COLOR" not in os.environ:
        head, colon, rest = text.partition(":")
        text = click.style(head + colon, fg="red", bold=True) + rest
    click.echo(text, err=True)


def _usage_words(error: click.ClickException) -> tuple[str, list[str]]:
    message, hints = error.format_message().rstrip("."), []
    if isinstance(error, click.NoSuchOption):
        message = f"there is no option {error.option_name}"
        if error.option_name in REFUSED_FLAGS:
            message = f"{error.option_name} is not supported"
            hints.append(REFUSED_FLAGS[error.option_name])
        elif error.possibilities:
            hints.append(f"did you mean {' or '.join(sorted(error.possibilities))}?")
    elif isinstance(error, NoSuchCommand):
        hints.append(error.hint)
    context = getattr(error, "ctx", None)
    if context is not None:
        hints.append(f"`{context.command_path} -h` lists what there is")
    return message, hints


def _frames(error: Exception) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


if __name__ == "__main__":
    main()
