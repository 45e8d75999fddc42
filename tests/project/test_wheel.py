"""The wheel: what is in it, and that it works where there is no compiler."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD_TOOLS = ("scikit_build_core", "nanobind")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built as `make wheel` builds it; objects of an earlier build are used again."""
    pytest.importorskip("scikit_build_core", reason="the build tools are not installed")
    if shutil.which("c++") is None:
        pytest.skip("there is no compiler to build a wheel with")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
            *("--disable-pip-version-check", "--wheel-dir", str(folder), str(ROOT)),
        ],
        check=True,
    )
    return next(folder.glob("octavo-*.whl"))


def test_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()

    tops = {name.partition("/")[0] for name in names}
    assert len(tops) == 2
    assert "octavo" in tops
    assert any(name.startswith("octavo/runtime/_native.") and name.endswith(".so") for name in names)
    assert "octavo/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.endswith((".cpp", ".h", ".pyc"))]


def test_wheel_works_in_a_fresh_environment_without_a_compiler(wheel, tmp_path):
    """The wheel is installed for real; its dependencies are lent by this environment, to save the download."""
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", str(wheel)], check=True)
    lent = environment / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages/lent.pth"
    lent.write_text(sysconfig.get_path("purelib") + "\n")
    environ = {"PATH": str(environment / "bin"), "HOME": str(tmp_path)}

    def run(*words: str) -> str:
        done = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "native module: built" in run("octavo", "--version")
    assert "pull" in run("octavo", "-h")
    where = run("python", "-c", "import octavo, octavo.runtime._native as n; print(octavo.__file__); print(n.__file__)")
    assert all(line.startswith(str(environment)) for line in where.splitlines()), where
