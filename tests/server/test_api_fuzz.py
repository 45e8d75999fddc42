"""The server's own OpenAPI document, asked at random: no answer from 500 on, none that the document does not name."""

from __future__ import annotations

from octavo.testing.api_fuzz import LIMITS, fuzz
from octavo.testing.server_process import ServerProcess


def test_whatever_the_document_allows_or_not_is_answered_as_it_says(tiny_model: str):
    with ServerProcess(tiny_model, "--enable-operator", *LIMITS) as server:
        fuzzed = fuzz(server.url, num_requests=150)

    assert fuzzed.failures == []
    assert fuzzed.num_requests >= 100
    assert fuzzed.by_status[200] >= 10 and fuzzed.by_status[400] >= 10, "both kinds were asked"
