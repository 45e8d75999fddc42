"""The server's log: lines on stderr for people, or one JSON object a line for machines. Never a prompt or an answer."""

from __future__ import annotations

import json
import logging
import sys
import time

from octavo.server.settings import LogFormat

_ACCESS = "octavo.access"


class _TextFormatter(logging.Formatter):
    """Lines such as `12:00:01 POST /v1/completions 200 0.153s id=...`."""

    default_time_format = "%H:%M:%S"
    default_msec_format = ""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        fields = getattr(record, "fields", None)
        head = self.formatTime(record)
        if fields is None:
            level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
            return f"{head} {level}{record.getMessage()}"
        ended = f" ended={fields['ended']}" if "ended" in fields else ""
        return (
            f"{head} {fields['method']} {_printable(fields['path'])} {fields['status']} {fields['duration_s']:.3f}s"
            f" id={fields['request_id']}{ended}"
        )


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True)


def start_log(form: LogFormat, *, is_quiet: bool = False) -> None:
    """Send what Octavo and its web server log to stderr.

    Args:
        is_quiet: Warnings and errors only.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
    for name in ("octavo", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    logging.getLogger("octavo").setLevel(logging.WARNING if is_quiet else logging.INFO)
    # Its own start and stop messages say less than ours.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def _printable(path: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in path[:200])
