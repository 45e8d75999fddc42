"""The version of Octavo, in this one place: packaging reads it from here, and so does `octavo --version`."""

from __future__ import annotations

__version__ = "0.1.0"
