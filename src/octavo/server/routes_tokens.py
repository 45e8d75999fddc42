"""`/tokenize` and `/detokenize`: what the server makes of a text, without computing anything."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.server.answers import while_connected
from octavo.server.json_body import StrictRoute, json_response, large_json_response
from octavo.server.protocol_answers import ERRORS, DetokenizeAnswer, TokenizeAnswer
from octavo.server.protocol_tokens import DetokenizeRequest, TokenizeRequest
from octavo.server.service import Service, num_chars_of


def router(service: Service) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(route_class=StrictRoute, tags=["Tokens"], responses=ERRORS)
    tokenizer = service.llm.tokenizer

    @routes.post("/tokenize", response_model=TokenizeAnswer)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Return the token ids that a prompt or chat has here, BOS and all."""
        service.check_model(body.model)
        body.check()
        num_chars = len(body.prompt or "") + num_chars_of(body.messages or ())
        work = service.read(lambda: _tokenized(service, body), num_chars=num_chars)
        return await large_json_response(await while_connected(request, work))

    @routes.post("/detokenize", response_model=DetokenizeAnswer)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """Return the text of token ids, special tokens included."""
        service.check_model(body.model)

        def spell() -> str:
            tokenizer.check_ids(body.tokens, param="tokens")
            return tokenizer.decode(body.tokens, skip_special_tokens=False)

        work = service.read(spell, num_chars=len(body.tokens))
        return json_response({"prompt": await while_connected(request, work)})

    return routes


def _tokenized(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    ids = _ids(service, body)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": service.llm.resolved.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [service.llm.tokenizer.token(token_id) or "" for token_id in ids]
    return answer


def _ids(service: Service, body: TokenizeRequest) -> tuple[int, ...]:
    if body.messages is not None:
        return service.render(
            body.messages,
            body.tools,
            add_generation_prompt=body.add_generation_prompt,
            variables=body.chat_template_kwargs,
            add_special_tokens=bool(body.add_special_tokens),
        ).token_ids
    assert body.prompt is not None, "checked"
    adds = body.add_special_tokens is not False
    return service.tokenize([body.prompt], add_special_tokens=adds)[0].token_ids
