"""Models from the Hugging Face hub, through its own client: HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE hold.

Only weights as safetensors, JSON and tokenizer files are taken: never a pickle, never code. The client keeps its own
cache, and that answers when the hub cannot be reached. Whether it can be is asked once, with a limit on the time: the
client itself would wait without one, or try again for half a minute.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.errors import DownloadError, ModelError, ModelNotFoundError
from octavo.models.aliases import HubId
from octavo.models.cache_folder import unwritable
from octavo.models.download import Progress
from octavo.models.web import shown

# Whose errors mean that the hub, the network or the name is to blame; older clients speak through requests.
_CLIENT_MODULES = frozenset({"huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3"})
ALLOWED_FILES = ("*.safetensors", "*.json", "tokenizer.model", "*.jinja")
PATIENCE_S = 5.0
"""How long the hub may take to say that a repository is there; `HF_HUB_ETAG_TIMEOUT` says otherwise."""
_CONFIG_PATIENCE = 4  # times as long, for the file itself
_OTHER_PLACES = ("set HF_ENDPOINT to a mirror, or give the path of a folder or .gguf file",)


def fetch_from_hub(hub_id: HubId, environ: Mapping[str, str], progress: Progress) -> Path:
    """Return the folder with the files of a repository, fetching those that are missing.

    Raises:
        ModelNotFoundError: no such repository or revision, or it is private.
        DownloadError: the hub cannot be reached and the cache does not hold it, or it needs a licence accepted.
        MachineError: the hub's cache cannot be written.
    """
    # Imported here: the client takes a while to load, and most models are local.
    from huggingface_hub import HfApi, snapshot_download  # noqa: PLC0415

    def ask(patience_s: float) -> None:
        api = HfApi(endpoint=environ.get("HF_ENDPOINT") or None)
        api.model_info(hub_id.repository, revision=hub_id.revision or "main", timeout=patience_s)

    def download(*, is_cached_only: bool) -> str:
        folder: str = snapshot_download(
            hub_id.repository,
            revision=hub_id.revision,
            endpoint=environ.get("HF_ENDPOINT") or None,
            allow_patterns=list(ALLOWED_FILES),
            tqdm_class=_reporting_bar(progress),
            local_files_only=is_cached_only,
        )
        return folder

    path = _fetched(hub_id, environ, ask, download)
    if not any(path.glob("*.safetensors")):
        raise ModelNotFoundError(
            f"{hub_id.repository} holds no safetensors",
            because="weights in other formats (pickles among them) are not read",
            hints=("for a GGUF repository, download the file and give its path",),
        )
    return path


def fetch_config(hub_id: HubId, environ: Mapping[str, str]) -> Path:
    """Return a repository's `config.json` alone; a few kilobytes, from the client's cache where that has it.

    Raises:
        As `fetch_from_hub`.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url  # noqa: PLC0415

    endpoint = environ.get("HF_ENDPOINT") or None

    def ask(patience_s: float) -> None:
        url = hf_hub_url(hub_id.repository, "config.json", revision=hub_id.revision, endpoint=endpoint)
        if get_hf_file_metadata(url, timeout=patience_s, endpoint=endpoint).commit_hash is None:
            raise ValueError("no commit is named, as every hub names one")

    def download(*, is_cached_only: bool) -> str:
        path: str = hf_hub_download(
            hub_id.repository,
            "config.json",
            revision=hub_id.revision,
            endpoint=endpoint,
            local_files_only=is_cached_only,
        )
        return path

    patience_s = _CONFIG_PATIENCE * _patience_s(environ)

    def download_soon(*, is_cached_only: bool) -> str:
        path: str = _within(patience_s, lambda: download(is_cached_only=is_cached_only))
        return path

    return _fetched(hub_id, environ, ask, download_soon)


def _fetched(
    hub_id: HubId, environ: Mapping[str, str], ask: Callable[[float], None], download: Callable[..., str]
) -> Path:
    """Download once the hub has answered; else take what the client's cache holds.

    Args:
        ask: Makes one request of the hub, with a limit in seconds.
    """
    try:
        _ask_hub(hub_id, environ, ask)
    except ModelError as refusal:
        try:
            with _quiet_client():
                return Path(download(is_cached_only=True))
        except Exception as error:
            raise (refusal if _is_about_hub(error) else _as_ours(error, hub_id, environ)) from error
    try:
        with _quiet_client():
            return Path(download(is_cached_only=False))
    except TimeoutError as error:
        raise _no_answer(hub_id, environ, _CONFIG_PATIENCE * _patience_s(environ)) from error
    except Exception as error:
        raise _as_ours(error, hub_id, environ) from error


def _ask_hub(hub_id: HubId, environ: Mapping[str, str], ask: Callable[[float], None]) -> None:
    """Return once the hub says that it has what is wanted.

    Raises:
        ModelNotFoundError: it has not.
        DownloadError: it does not say, so that its cache has to do.
    """
    patience_s = _patience_s(environ)
    try:
        _within(patience_s, lambda: ask(patience_s))
    except TimeoutError as error:
        raise _no_answer(hub_id, environ, patience_s) from error
    except ValueError as error:  # its answer is no JSON: the page of a login, or some other server
        if _is_about_hub(error):
            raise _as_ours(error, hub_id, environ) from error
        raise DownloadError(
            f"{hub_id.repository} is not in the local cache, and {_where(environ)} does not answer as a hub does",
            because="a login page or a proxy may have answered in its place",
            hints=_OTHER_PLACES,
        ) from error
    except Exception as error:
        raise _as_ours(error, hub_id, environ) from error


def _within(seconds: float, work: Callable[[], Any]) -> Any:
    """Do some work, and stop waiting for it when it takes too long; name look-ups know no limit of their own.

    Raises:
        TimeoutError: it is not done; it may go on, and what comes of it is dropped.
    """
    results: list[Any] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with _quiet_client():
                results.append(work())
        except BaseException as error:  # noqa: BLE001 - carried over to the thread that waits
            failures.append(error)

    thread = threading.Thread(target=run, name="octavo-hub", daemon=True)
    thread.start()
    thread.join(seconds)
    if failures:
        raise failures[0]
    if not results:
        raise TimeoutError
    return results[0]


@contextmanager
def _quiet_client() -> Iterator[None]:
    """Keep the client from writing to stderr what we say in words of our own; HF_HUB_VERBOSITY asks for it."""
    from huggingface_hub.utils import logging as client_log  # noqa: PLC0415

    before = client_log.get_verbosity()
    if "HF_HUB_VERBOSITY" not in os.environ and "HF_DEBUG" not in os.environ:
        client_log.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        client_log.set_verbosity(before)


def _patience_s(environ: Mapping[str, str]) -> float:
    try:
        asked = float(environ.get("HF_HUB_ETAG_TIMEOUT") or PATIENCE_S)
    except ValueError:
        return PATIENCE_S
    return asked if 0 < asked < threading.TIMEOUT_MAX / _CONFIG_PATIENCE else PATIENCE_S


def _where(environ: Mapping[str, str]) -> str:
    return shown(environ.get("HF_ENDPOINT") or "https://huggingface.co")


def _is_about_hub(error: Exception) -> bool:
    return type(error).__module__.partition(".")[0] in _CLIENT_MODULES or isinstance(error, RuntimeError)


def _as_ours(error: Exception, hub_id: HubId, environ: Mapping[str, str]) -> Exception:
    """Return an error of the client as one of ours; a bug, ours or the client's, stays what it is."""
    if _is_about_hub(error):
        return _explained(error, hub_id, environ)
    if isinstance(error, OSError):
        return unwritable(Path(environ.get("HF_HOME") or "~/.cache/huggingface"), error)
    return error


def _no_answer(hub_id: HubId, environ: Mapping[str, str], seconds: float) -> DownloadError:
    return DownloadError(
        f"{hub_id.repository} is not in the local cache, and {_where(environ)} did not answer within {seconds:g} s",
        hints=(*_OTHER_PLACES, "on a slow network, set HF_HUB_ETAG_TIMEOUT to more seconds"),
    )


def _explained(error: Exception, hub_id: HubId, environ: Mapping[str, str]) -> ModelError:
    from huggingface_hub import errors  # noqa: PLC0415

    repository, where = hub_id.repository, _where(environ)
    if isinstance(error, errors.GatedRepoError):
        return DownloadError(
            f"{repository} is only for those who accepted its licence",
            hints=(f"accept it at {where}/{repository}, and set HF_TOKEN to your access token",),
        )
    if isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError | errors.HFValidationError):
        named = repository if hub_id.revision is None else f"{repository} at {hub_id.revision}"
        return ModelNotFoundError(
            f"{where} has no {named}", hints=("check the name; for a private one, set HF_TOKEN to your access token",)
        )
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return ModelNotFoundError(
            f"{repository} at {where} holds no config.json",
            hints=("for a GGUF repository, download the file and give its path",),
        )
    if isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        is_offline = environ.get("HF_HUB_OFFLINE", "0").lower() not in {"", "0", "false", "no", "off"}
        why = "HF_HUB_OFFLINE is set" if is_offline else f"{where} cannot be reached"
        return DownloadError(f"{repository} is not in the local cache, and {why}", hints=_OTHER_PLACES)
    if isinstance(error, errors.HfHubHTTPError):
        is_barred = error.response is not None and error.response.status_code in (401, 403)
        return DownloadError(
            f"{repository} could not be fetched from {where}",
            because=_first_line(error),
            hints=("set HF_TOKEN to an access token that is let in", *_OTHER_PLACES) if is_barred else _OTHER_PLACES,
        )
    return DownloadError(
        f"{repository} is not in the local cache, and {where} cannot be reached",
        because=_first_line(error) + _proxy_words(where, environ),
        hints=_OTHER_PLACES,
    )


def _proxy_words(where: str, environ: Mapping[str, str]) -> str:
    """Say which variable sends the request elsewhere; its value may hold a password."""
    scheme = where.partition(":")[0].upper()
    names = (f"{scheme}_PROXY", f"{scheme}_PROXY".lower(), "ALL_PROXY", "all_proxy")
    name = next((each for each in names if environ.get(each)), None)
    return "" if name is None else f" (by way of the proxy of {name})"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _reporting_bar(progress: Progress) -> Any:
    """Return a bar class for the client that draws nothing and passes the bytes on."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # noqa: PLC0415 - public, but unmarked

    done_bytes: dict[int, int] = {}

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts_bytes = options.get("unit") == "B"
            self._sink = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - closed with the bar
            super().__init__(*args, **{**options, "file": self._sink})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts_bytes and n:
                # The client may run one bar for the network and one for the disk; the further one is told. A bar that
                # is switched off does not count for itself.
                done_bytes[id(self)] = done_bytes.get(id(self), 0) + int(n)
                progress("downloading", max(done_bytes.values()), int(getattr(self, "total", None) or 0) or None)
            updated: bool | None = super().update(n)
            return updated

        def close(self) -> None:
            super().close()
            self._sink.close()

    return Bar
