"""Models from a hub on this machine, through the hub's own client and its environment variables.

The client reads its variables when it is imported, so each case is a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

REVISION = "a" * 40
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"\x08\0\0\0\0\0\0\0{}      weights",
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"a pickle",
    "modeling_custom.py": b"print('code')",
}


@pytest.fixture
def hub(server, answer):
    """A hub with one repository of five files, two of which must not be taken."""

    def add(repository: str, files: dict[str, bytes]) -> None:
        info = {"id": repository, "sha": REVISION, "siblings": [{"rfilename": name} for name in files]}
        entries = [
            {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
            for name, body in files.items()
        ]
        for revision in ("main", "v1.0", REVISION):
            server.answers[f"/api/models/{repository}/revision/{revision}"] = answer(json.dumps(info).encode())
            server.answers[f"/api/models/{repository}/tree/{revision}"] = answer(json.dumps(entries).encode())
            for name, body in files.items():
                server.answers[f"/{repository}/resolve/{revision}/{name}"] = answer(
                    body, headers={"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": REVISION}
                )

    add("org/tiny", FILES)
    add("org/pickled", {"config.json": b"{}", "pytorch_model.bin": b"a pickle"})
    return server


@pytest.fixture
def pull(hub, tmp_path):
    """Run `octavo pull`, or another command, as a process that knows only this hub."""

    def run(model: str, command: str = "pull", **environ: str):
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        home = {"HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url}
        quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "octavo", command, model, "--json"],
            env={**kept, **home, **quiet, **environ},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, json.loads(done.stdout), done.stderr

    return run


def names_in(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def test_weights_and_tokenizer_come_and_pickles_and_code_stay(pull, hub, tmp_path):
    code, document, err = pull("org/tiny", HF_TOKEN="hf_sesame")

    assert code == 0, err
    folder = document["path"]
    assert folder.startswith(str(tmp_path / "hf"))
    assert names_in(folder) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert all(asked.headers.get("authorization") == "Bearer hf_sesame" for asked in hub.asked if "org/" in asked.path)
    assert "hf_sesame" not in err
    assert "downloading" in err


def test_cached_repository_works_offline(pull, hub):
    assert pull("org/tiny")[0] == 0
    hub.asked.clear()

    code, document, _ = pull("org/tiny", HF_HUB_OFFLINE="1")

    assert code == 0
    assert "model.safetensors" in names_in(document["path"])
    assert not hub.asked


def test_revision_is_asked_for(pull, hub):
    assert pull("org/tiny@v1.0")[0] == 0

    assert any("/revision/v1.0" in asked.path for asked in hub.asked)


def test_unknown_repository_names_the_hub_and_the_token(pull, hub, answer):
    missing = answer(status=404, headers={"X-Error-Code": "RepoNotFound"})
    hub.answers["/api/models/org/none/revision/main"] = missing

    code, document, _ = pull("org/none")

    assert code == 1
    assert document["error"]["code"] == "model-not-found"
    assert hub.url in document["error"]["message"]
    assert "HF_TOKEN" in document["error"]["hints"][0]


def test_gated_repository_says_how_to_get_in(pull, hub, answer):
    hub.answers["/api/models/org/gated/revision/main"] = answer(status=403, headers={"X-Error-Code": "GatedRepo"})

    code, document, _ = pull("org/gated")

    assert code == 1
    assert "accepted its licence" in document["error"]["message"]
    assert "HF_TOKEN" in document["error"]["hints"][0]


def test_a_hub_that_lets_nobody_in_without_a_token_asks_for_one(pull, hub, answer):
    hub.answers["/api/models/org/tiny/revision/main"] = answer(status=401)

    code, document, _ = pull("org/tiny")

    assert code == 1
    assert "HF_TOKEN" in document["error"]["hints"][0]


def test_offline_without_the_model_names_the_variable(pull):
    code, document, _ = pull("org/tiny", HF_HUB_OFFLINE="1")

    assert code == 1
    assert document["error"]["code"] == "download-failed"
    assert "HF_HUB_OFFLINE is set" in document["error"]["message"]


def test_unreachable_hub_is_named(pull):
    code, document, _ = pull("org/tiny", HF_ENDPOINT="http://127.0.0.1:1")

    assert code == 1
    assert "http://127.0.0.1:1 cannot be reached" in document["error"]["message"]
    assert "HF_ENDPOINT" in document["error"]["hints"][0]


@pytest.mark.parametrize("command", ["plan", "pull"])
def test_a_hub_that_cannot_be_reached_costs_one_try_and_our_own_words(pull, command):
    code, document, err = pull("org/tiny", command, HF_ENDPOINT="http://127.0.0.1:1")

    assert code == 1
    assert document["error"]["code"] == "download-failed"
    assert (
        "org/tiny is not in the local cache, and http://127.0.0.1:1 cannot be reached" in document["error"]["message"]
    )
    assert err.startswith("error[download-failed]: ")
    assert "etrying" not in err


@pytest.mark.parametrize("command", ["plan", "pull"])
def test_a_hub_that_never_answers_is_given_up(pull, command):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"http://127.0.0.1:{silent.getsockname()[1]}"

        code, document, _ = pull("org/tiny", command, HF_ENDPOINT=where, HF_HUB_ETAG_TIMEOUT="1")

    assert code == 1
    assert f"{where} did not answer within 1 s" in document["error"]["message"]
    assert any("HF_HUB_ETAG_TIMEOUT" in hint for hint in document["error"]["hints"])


def test_a_configuration_that_does_not_come_is_given_up_without_the_clients_own_lines(pull, hub, answer):
    hub.answers["/org/tiny/resolve/main/config.json"] = answer(status=503)

    code, document, err = pull("org/tiny", "plan", HF_HUB_ETAG_TIMEOUT="1")

    assert code == 1
    assert document["error"]["code"] == "download-failed"
    assert err.startswith("error[download-failed]: ")
    assert "etrying" not in err


def test_a_cached_repository_serves_while_the_hub_fails(pull, hub, answer):
    assert pull("org/tiny")[0] == 0
    hub.answers["/api/models/org/tiny/revision/main"] = answer(status=503)

    code, document, _ = pull("org/tiny")

    assert code == 0
    assert "model.safetensors" in names_in(document["path"])


def test_a_login_page_in_place_of_the_hub_is_said_to_be_no_hub(pull, hub, answer):
    page = answer(b"<html>log in</html>", headers={"Content-Type": "text/html"})
    hub.answers["/api/models/org/tiny/revision/main"] = page

    code, document, _ = pull("org/tiny")

    assert code == 1
    assert "does not answer as a hub does" in document["error"]["message"]


def test_a_proxy_that_is_not_there_is_named_without_its_password(pull):
    proxy = "http://user:sesame@127.0.0.1:1"

    code, _, err = pull("org/tiny", "plan", HF_ENDPOINT="http://hub.invalid", HTTP_PROXY=proxy, http_proxy=proxy)

    assert code == 1
    assert "by way of the proxy of HTTP_PROXY" in err
    assert "sesame" not in err


def test_a_slip_in_a_known_name_gets_the_name_as_a_hint(pull):
    _, document, _ = pull("meta-llama/Meta-Lama-3-70B", "plan", HF_ENDPOINT="http://127.0.0.1:1")

    assert document["error"]["hints"][0] == "did you mean `meta-llama/Meta-Llama-3-70B`?"


def test_repository_without_safetensors_is_refused(pull):
    code, document, _ = pull("org/pickled")

    assert code == 1
    assert "holds no safetensors" in document["error"]["message"]


def test_a_plan_asks_the_hub_for_the_configuration_alone(hub, tmp_path, answer):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16",
    }
    body = json.dumps(config).encode()
    headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": REVISION}
    hub.answers["/org/tiny/resolve/main/config.json"] = answer(body, headers=headers)
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    environ = {**kept, "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url}
    quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}

    def plan(*args: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "octavo", "plan", *args, "--memory", "1GiB", "--json"],
            env={**environ, **quiet, **more},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    first = plan("org/tiny")
    assert first.returncode == 0, first.stderr
    document = json.loads(first.stdout)
    assert document["model"] == "org/tiny"
    assert document["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    assert not any("safetensors" in str(path) for path in (tmp_path / "hf").rglob("*"))
    assert json.loads(plan("org/tiny", HF_HUB_OFFLINE="1").stdout)["model"] == "org/tiny"
    gone = plan("org/absent")
    assert gone.returncode == 1
    assert json.loads(gone.stdout)["error"]["code"] in ("model-not-found", "download-failed")
