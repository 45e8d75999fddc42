"""Routes of OpenAI's API: models, completions, chat completions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.core.sampling import SamplingParams
from octavo.errors import InvalidParameterError, RequestTooLongError
from octavo.server.answers import Answers, while_connected
from octavo.server.chat import Chat
from octavo.server.completions import Completion
from octavo.server.errors import renamed, to_api_error
from octavo.server.json_body import LARGE_BODY_BYTES, StrictRoute, json_response, large_json_response
from octavo.server.protocol_answers import ERRORS, ChatAnswer, CompletionAnswer, ModelCard, ModelList
from octavo.server.protocol_chat import ChatRequest
from octavo.server.protocol_completions import CompletionRequest
from octavo.server.request_ids import engine_id
from octavo.server.service import Service, num_chars_of, salt_of
from octavo.server.stream import EventStream
from octavo.server.tool_calls import required_calls, shown_tools

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, or with stream=true its chunks", "content": {"text/event-stream": {}}}
}


def router(service: Service) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(route_class=StrictRoute, prefix="/v1", tags=["OpenAI"], responses=ERRORS)
    started = int(time.time())

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "octavo",
            "root": service.names[0],
            "parent": None,
            "max_model_len": service.llm.resolved.max_model_len,
        }

    @routes.get("/models", response_model=ModelList)
    async def models() -> Response:
        """List the names under which the model is served."""
        return json_response({"object": "list", "data": [card(name) for name in service.names]})

    @routes.get("/models/{name:path}", response_model=ModelCard)
    async def model(name: str) -> Response:
        """Say what is known of one name."""
        return json_response(card(service.check_model(name)))

    @routes.post("/completions", response_model=CompletionAnswer, responses=_STREAM)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        name = service.check_model(body.model)
        params = await _work_out(service, request, body.sampling_params)  # refused before the text is read
        service.check_answers(len(body.prompt), body.n)
        prompts = await while_connected(
            request,
            service.read(
                lambda: service.tokenize(body.prompt, add_special_tokens=body.add_special_tokens),
                num_chars=sum(map(len, body.prompt)),
            ),
        )
        call = Completion(
            service,
            body,
            prompts,
            params,
            request_id=engine_id("cmpl", request.state.client_id),
            model=name,
            cache_salt=salt_of(request, body.cache_salt),
        )
        return await _answer(service, call, request, is_stream=body.stream, structured_by=body.structured_by or "tools")

    @routes.post("/chat/completions", response_model=ChatAnswer, responses=_STREAM)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Go on with a conversation."""
        name = service.check_model(body.model)
        params = await _work_out(
            service, request, lambda: body.sampling_params(required_calls(body, service.tool_format))
        )
        tools = shown_tools(body)
        prompt = await while_connected(
            request,
            service.read(
                lambda: service.render(
                    body.messages,
                    tools,
                    add_generation_prompt=body.add_generation_prompt,
                    variables=body.chat_template_kwargs,
                ),
                num_chars=num_chars_of(body.messages),
            ),
        )
        call = Chat(
            service,
            body,
            prompt,
            params,
            request_id=engine_id("chatcmpl", request.state.client_id),
            model=name,
            cache_salt=salt_of(request, body.cache_salt),
        )
        return await _answer(service, call, request, is_stream=body.stream, structured_by=body.structured_by or "tools")

    return routes


async def _work_out(service: Service, request: Request, work: Callable[[], SamplingParams]) -> SamplingParams:
    """Work out a request's parameters: in a thread if it is large, since it may be a schema that is."""
    num_bytes = len(await request.body())
    if num_bytes <= LARGE_BODY_BYTES:
        return work()
    return await while_connected(request, service.read(work, num_chars=num_bytes))


async def _start(service: Service, call: Completion | Chat, *, structured_by: str) -> Answers:
    try:
        return await Answers.start(service.llm, call.messages)
    except RequestTooLongError as error:
        answered = to_api_error(error)
        if answered.param == "prompt" and isinstance(call, Chat):
            answered.param = "messages"
        raise answered from error
    except InvalidParameterError as error:
        if error.param != "structured":
            raise
        raise renamed(error, structured_by) from error  # the engine does not know how the caller spelled it


async def _answer(
    service: Service, call: Completion | Chat, request: Request, *, is_stream: bool, structured_by: str
) -> Response:
    """Start a call's requests and answer it, whole or as a stream."""
    request.state.request_id = request.state.client_id or call.messages[0].request_id
    service.ids.note(request.state.client_id, call.messages[0].request_id)
    with contextlib.ExitStack() as ending:
        service.scores.hold(call.num_scores)
        ending.callback(service.scores.release, call.num_scores)
        answers = await while_connected(request, _start(service, call, structured_by=structured_by))
        ending.callback(answers.close)
        if is_stream:
            end = ending.pop_all().close
            return EventStream(call.chunks(answers), keep_alive_s=service.settings.keep_alive, on_end=end)
        whole = await while_connected(request, call.whole(answers))
        if not call.num_scores:
            return json_response(whole)
        large = await large_json_response(whole)
        large.on_end = ending.pop_all().close
        return large
