"""Models from the Hugging Face hub, through its own client: HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE hold.

Only weights as safetensors, JSON and tokenizer files are taken: never a pickle, never code. The client keeps its own
cache, and answers from it when the hub cannot be reached.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
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


def fetch_from_hub(hub_id: HubId, environ: Mapping[str, str], progress: Progress) -> Path:
    """Return the folder with the files of a repository, fetching those that are missing.

    Raises:
        ModelNotFoundError: no such repository or revision, or it is private.
        DownloadError: the hub cannot be reached and the cache does not hold it, or it needs a licence accepted.
        MachineError: the hub's cache cannot be written.
    """
    # Imported here: the client takes a while to load, and most models are local.
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    try:
        folder = snapshot_download(
            hub_id.repository,
            revision=hub_id.revision,
            endpoint=environ.get("HF_ENDPOINT") or None,
            allow_patterns=list(ALLOWED_FILES),
            tqdm_class=_reporting_bar(progress),
        )
    except Exception as error:
        origin = type(error).__module__.partition(".")[0]
        if origin in _CLIENT_MODULES or isinstance(error, RuntimeError):
            raise _explained(error, hub_id, environ) from error
        if isinstance(error, OSError):
            raise unwritable(Path(environ.get("HF_HOME") or "~/.cache/huggingface"), error) from error
        raise  # a bug, ours or the client's
    path = Path(folder)
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
    from huggingface_hub import hf_hub_download  # noqa: PLC0415

    try:
        path = hf_hub_download(
            hub_id.repository, "config.json", revision=hub_id.revision, endpoint=environ.get("HF_ENDPOINT") or None
        )
    except Exception as error:
        origin = type(error).__module__.partition(".")[0]
        if origin in _CLIENT_MODULES or isinstance(error, RuntimeError):
            raise _explained(error, hub_id, environ) from error
        if isinstance(error, OSError):
            raise unwritable(Path(environ.get("HF_HOME") or "~/.cache/huggingface"), error) from error
        raise  # a bug, ours or the client's
    return Path(path)


def _explained(error: Exception, hub_id: HubId, environ: Mapping[str, str]) -> ModelError:
    from huggingface_hub import errors  # noqa: PLC0415

    repository = hub_id.repository
    where = shown(environ.get("HF_ENDPOINT") or "https://huggingface.co")
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
    if isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        is_offline = environ.get("HF_HUB_OFFLINE", "0").lower() not in {"", "0", "false", "no", "off"}
        why = "HF_HUB_OFFLINE is set" if is_offline else f"{where} cannot be reached"
        return DownloadError(
            f"{repository} is not in the local cache, and {why}",
            hints=("set HF_ENDPOINT to a mirror, or give the path of a folder or .gguf file",),
        )
    return DownloadError(
        f"{repository} could not be fetched from {where}: {_first_line(error)}",
        hints=("set HF_ENDPOINT to a mirror, or give the path of a folder or .gguf file",),
    )


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
