"""The folder where downloaded models are kept: OCTAVO_CACHE, else XDG_CACHE_HOME/octavo, else ~/.cache/octavo.

Naming the folder writes nothing; it is made when something is to be put there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from octavo.errors import MachineError

CACHE_VARIABLE = "OCTAVO_CACHE"


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the cache folder, whether or not it exists.

    Raises:
        MachineError: no variable names one, and there is no home folder.
    """
    if environ.get(CACHE_VARIABLE):
        return Path(environ[CACHE_VARIABLE]).expanduser()
    xdg = environ.get("XDG_CACHE_HOME", "")
    if xdg and Path(xdg).is_absolute():  # relative ones are to be ignored, says the XDG specification
        return Path(xdg) / "octavo"
    home = environ.get("HOME", "")
    if not home:
        raise MachineError(
            "there is no folder to keep models in",
            because=f"neither {CACHE_VARIABLE} nor XDG_CACHE_HOME nor HOME is set",
            hints=(f"set {CACHE_VARIABLE} to a folder, or give the path of a model file",),
        )
    return Path(home) / ".cache" / "octavo"


def make_folder(folder: Path) -> None:
    """Create a folder of the cache.

    Raises:
        MachineError: the file system refuses; the message names the folder and the reason.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error


def unwritable(path: Path, error: OSError) -> MachineError:
    """Return the error for a cache that cannot be written."""
    return MachineError(
        f"cannot write {path}: {error.strerror or error}",
        because="downloaded models are kept there",
        hints=(f"set {CACHE_VARIABLE} to a folder you can write, or free some space",),
    )
