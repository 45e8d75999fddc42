"""Where packages come from, as pip would decide it."""

from __future__ import annotations

import pytest

from octavo.errors import DownloadError, InvalidParameterError
from octavo.models.pip_settings import DEFAULT_INDEX, DEFAULT_TIMEOUT_S, read_pip_settings


def settings(tmp_path, files=None, **environ):
    for name, text in (files or {}).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environ.setdefault("HOME", str(tmp_path / "home"))
    return read_pip_settings(environ, root=tmp_path, prefix=str(tmp_path / "venv"))


def test_nothing_set_means_the_default_index(tmp_path):
    found = settings(tmp_path)

    assert [place.url for place in found.indexes] == [DEFAULT_INDEX]
    assert found.find_links == ()
    assert found.timeout_s == DEFAULT_TIMEOUT_S
    assert (found.cert, found.proxy, found.trusted_hosts) == ("", "", ())


def test_environment_wins_over_every_file_and_names_itself(tmp_path):
    files = {"etc/pip.conf": "[global]\nindex-url = https://file/simple\ntimeout = 5\n"}

    found = settings(tmp_path, files, PIP_INDEX_URL="https://env/simple", PIP_EXTRA_INDEX_URL="https://a https://b")

    assert [(place.url, place.setting) for place in found.indexes] == [
        ("https://env/simple", "PIP_INDEX_URL"),
        ("https://a", "PIP_EXTRA_INDEX_URL"),
        ("https://b", "PIP_EXTRA_INDEX_URL"),
    ]
    assert found.timeout_s == 5
    assert found.settings["timeout"] == f"timeout in {tmp_path}/etc/pip.conf"


def test_files_override_each_other_from_system_to_named_file(tmp_path):
    def index(name):
        return f"[global]\nindex-url = https://{name}/simple\n"

    ladder = {
        "etc/xdg/pip/pip.conf": index("xdg"),
        "etc/pip.conf": index("etc"),
        "home/.pip/pip.conf": index("legacy"),
        "home/.config/pip/pip.conf": index("user"),
        "venv/pip.conf": index("venv"),
        "named.conf": index("named"),
    }
    seen = []
    for count in range(1, len(ladder) + 1):
        files = dict(list(ladder.items())[:count])
        environ = {"PIP_CONFIG_FILE": str(tmp_path / "named.conf")} if "named.conf" in files else {}
        seen.append(settings(tmp_path, files, **environ).indexes[0].url)

    assert seen == [f"https://{name}/simple" for name in ("xdg", "etc", "legacy", "user", "venv", "named")]


def test_download_section_wins_over_global(tmp_path):
    text = "[download]\nproxy = http://download:1\n[global]\nproxy = http://global:1\n[install]\nproxy = http://no:1\n"

    assert settings(tmp_path, {"etc/pip.conf": text}).proxy == "http://download:1"


def test_null_config_file_turns_all_files_off(tmp_path):
    files = {"etc/pip.conf": "[global]\nindex-url = https://file/simple\n"}

    assert settings(tmp_path, files, PIP_CONFIG_FILE="/dev/null").indexes[0].url == DEFAULT_INDEX


def test_a_config_file_without_end_is_refused(tmp_path):
    with pytest.raises(InvalidParameterError, match="holds more than"):
        settings(tmp_path, {}, PIP_CONFIG_FILE="/dev/zero")


def test_no_index_leaves_only_the_folders(tmp_path):
    found = settings(tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS="/wheels https://page", PIP_INDEX_URL="https://x")

    assert found.indexes == ()
    assert [place.url for place in found.find_links] == ["/wheels", "https://page"]


def test_lists_may_span_lines_and_keys_may_use_underscores(tmp_path):
    text = "[global]\nextra_index_url =\n    https://a/simple\n    https://b/simple\ntrusted-host = a b:8443\n"

    found = settings(tmp_path, {"etc/pip.conf": text})

    assert [place.url for place in found.indexes[1:]] == ["https://a/simple", "https://b/simple"]
    assert found.trusted_hosts == ("a", "b:8443")


def test_certificate_bundle_of_other_tools_is_a_fallback(tmp_path):
    assert settings(tmp_path, REQUESTS_CA_BUNDLE="/r", CURL_CA_BUNDLE="/c").cert == "/r"
    found = settings(tmp_path, REQUESTS_CA_BUNDLE="/r", PIP_CERT="/p")
    assert (found.cert, found.settings["cert"]) == ("/p", "PIP_CERT")


def test_both_spellings_of_the_timeout_are_understood(tmp_path):
    assert settings(tmp_path, PIP_DEFAULT_TIMEOUT="180").timeout_s == 180
    assert settings(tmp_path, PIP_TIMEOUT="7").timeout_s == 7
    with pytest.raises(InvalidParameterError, match="PIP_TIMEOUT"):
        settings(tmp_path, PIP_TIMEOUT="soon")


def test_broken_file_is_named(tmp_path):
    with pytest.raises(InvalidParameterError, match=r"etc/pip\.conf: cannot be parsed"):
        settings(tmp_path, {"etc/pip.conf": "index-url = https://x\n"})


@pytest.mark.parametrize("variable", ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_PROXY"])
@pytest.mark.parametrize("url", ["http://[::1", "http://host:port/simple"])
def test_address_that_cannot_be_parsed_names_its_setting(tmp_path, variable, url):
    with pytest.raises(DownloadError, match=f"{variable}: .* is not an address"):
        settings(tmp_path, **{variable: url})
