"""The real model that tests use: a file named in the environment, else the product's own default model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from octavo.errors import ModelNotFoundError
from octavo.models.fetch import fetch

DEFAULT_MODEL = "smollm2-135m"
ENVIRONMENT_VARIABLE = "OCTAVO_TEST_MODEL"


def find_real_model(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the GGUF file of the default model, fetching it as `octavo pull` would if it is not there.

    Args:
        environ: `OCTAVO_TEST_MODEL` names a file to use instead.

    Raises:
        OctavoError: it cannot be had here; a test skips with that reason.
    """
    named = environ.get(ENVIRONMENT_VARIABLE)
    if not named:
        return fetch(DEFAULT_MODEL, environ=environ).path
    path = Path(named)
    if not path.is_file():
        raise ModelNotFoundError(f"{ENVIRONMENT_VARIABLE} names {path}, which is no file")
    return path
