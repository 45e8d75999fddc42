"""ServerSettings: what a person asks of the server, beside the engine behind it. The server's option table.

Flags, `OCTAVO_*` variables and the file of `--config` are made from it, as they are for the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.config.option import Option, option, options_of
from octavo.errors import InvalidParameterError
from octavo.units import MIB

LogFormat = Literal["text", "json"]
ToolCallParser = Literal["auto", "hermes", "llama3_json"]
_SECRETS = ("api_key", "operator_key")
MAX_HEADER_BYTES = 32 * 1024


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ServerSettings:
    """Everything that can be asked of the server.

    Raises:
        InvalidParameterError: a value outside its range, or two values that contradict each other.
    """

    host: str = option(
        default="127.0.0.1", kind="text", group="Server", help="Address to listen on; 0.0.0.0 is every interface"
    )
    port: int = option(
        default=8000,
        kind="integer",
        minimum=0,
        maximum=65535,
        group="Server",
        help="Port to listen on; 0 takes a free one",
    )
    served_model_name: tuple[str, ...] = option(
        default=(),
        kind="list",
        group="Server",
        help="Name that clients ask for; repeatable, all name the same model",
        auto="the model as asked, a path without its folder",
    )
    tool_call_parser: ToolCallParser = option(
        default="auto",
        kind="choice",
        choices=("auto", "hermes", "llama3_json"),
        group="Server",
        help="How the model writes calls of tools",
        auto="as its chat template teaches them",
    )
    max_waiting: int = option(
        default=1024,
        kind="count",
        group="Server",
        unit="requests",
        help="Most requests that wait for a seat; more are answered 429",
        maximum=1_000_000,
    )
    drain_timeout: float = option(
        default=25.0,
        kind="seconds",
        group="Server",
        help="Longest that running answers may take to end after SIGTERM or Ctrl-C; then they are aborted",
    )
    keep_alive: float = option(
        default=15.0,
        kind="seconds",
        group="Server",
        help="Silence in a stream after which a comment keeps proxies from closing it; 0 sends none",
    )
    stall_timeout: float = option(
        default=10.0,
        kind="seconds",
        group="Server",
        help="Time without a step, while there is work, after which /health says 503",
    )
    log_format: LogFormat = option(
        default="text",
        kind="choice",
        choices=("text", "json"),
        group="Server",
        help="How the log on stderr is written; prompts and answers are never in it",
    )
    metrics_prefix: str = option(
        default="octavo", kind="text", group="Server", help="First word of the names on /metrics"
    )
    api_key: tuple[str, ...] = option(
        default=(),
        kind="list",
        group="Security",
        help="Key that clients must send as a bearer token; repeatable",
        auto="none, everyone who reaches the port may ask",
    )
    api_key_file: str | None = option(
        default=None, kind="text", group="Security", help="File with one key a line", auto="none"
    )
    share_cache: bool = option(
        default=False,
        kind="flag",
        group="Security",
        help="Let callers with different keys reuse each other's blocks; how fast an answer begins then tells one what"
        " another has asked",
    )
    operator_key: str | None = option(
        default=None,
        kind="text",
        group="Security",
        help="Key for the operator endpoints (/kv, /kv/reset, /requests/ID)",
        auto="none",
    )
    enable_operator: bool = option(
        default=False,
        kind="flag",
        group="Security",
        help="Open the operator endpoints to everyone who may ask for answers",
    )
    show_prompts: bool = option(
        default=False,
        kind="flag",
        group="Security",
        help="Show the text of requests on the page and in /requests/ID",
    )
    allowed_host: tuple[str, ...] = option(
        default=(),
        kind="list",
        group="Security",
        help="Name under which browsers and clients may reach the server; repeatable, * is any",
        auto="localhost, this machine's name, --host, and every IP address",
    )
    cors_origin: tuple[str, ...] = option(
        default=(),
        kind="list",
        group="Security",
        help="Web page (https://example.org) that may call the server; repeatable, * is any",
        auto="none",
    )
    max_connections: int | None = option(
        default=None,
        kind="count",
        group="Security",
        unit="connections",
        help="Most connections at a time; more are answered 503, and closed",
        auto="1,024 more than --max-waiting, as far as the limit of open files goes",
        maximum=1_000_000,
    )
    max_body_bytes: int = option(
        default=4 * MIB, kind="bytes", group="Security", help="Largest body of a request; larger ones are answered 413"
    )
    max_prompt_chars: int = option(
        default=2 * MIB,
        kind="count",
        group="Security",
        unit="characters",
        help="Longest text of one prompt or chat",
    )

    def __post_init__(self) -> None:
        for each in SERVER_OPTIONS:
            value = getattr(self, each.name)
            if value is not None:
                # As in EngineConfig: the one place a frozen value is completed.
                object.__setattr__(self, each.name, each.read(value, param=each.name))
        _check_operator(self)
        _check_keys(self)
        _check_names(self)

    def __repr__(self) -> str:
        """Leave out what is secret: a value like this ends up in logs."""
        shown = (each.name for each in SERVER_OPTIONS if each.name not in _SECRETS)
        return f"ServerSettings({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    @property
    def has_operator(self) -> bool:
        """Whether anybody may call the operator endpoints."""
        return self.enable_operator or self.operator_key is not None


SERVER_OPTIONS: tuple[Option, ...] = options_of(ServerSettings)


def _check_operator(settings: ServerSettings) -> None:
    if settings.enable_operator and settings.operator_key is not None:
        raise InvalidParameterError(
            "given together with operator_key",
            param="enable_operator",
            because="one opens the operator endpoints to all callers, the other to one key",
            hints=("give one of them",),
        )


def _check_keys(settings: ServerSettings) -> None:
    for name, keys in (("api_key", settings.api_key), ("operator_key", (settings.operator_key or "x",))):
        for key in keys:
            # What cannot be sent in a header would lock everybody out.
            if not key.isascii() or not key.isprintable() or " " in key:
                raise InvalidParameterError("a key is printable ASCII without spaces", param=name)


def _check_names(settings: ServerSettings) -> None:
    # What no browser ever sends would let nobody in, without a word.
    for host in settings.allowed_host:
        if "/" in host or (":" in host and not host.startswith("[")):
            raise InvalidParameterError(
                f"{host!r} is no name alone", param="allowed_host", hints=("leave out scheme, port and path",)
            )
    for origin in settings.cors_origin:
        scheme, _, rest = origin.partition("://")
        if origin not in ("*", "null") and (not scheme or not rest or "/" in rest):
            raise InvalidParameterError(
                f"{origin!r} is no origin", param="cors_origin", hints=("write scheme and name: https://example.org",)
            )
