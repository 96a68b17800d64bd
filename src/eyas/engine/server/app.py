"""The routes."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from eyas import __version__
from eyas.engine.server.answers import Answering, ChatShape, CompletionShape, Shape
from eyas.engine.server.errors import ApiError, invalid
from eyas.engine.server.metrics import exposition
from eyas.engine.server.openapi import description
from eyas.engine.server.protocol import ChatRequest, CompletionRequest
from eyas.engine.server.service import Service

Kind = TypeVar("Kind", ChatRequest, CompletionRequest)
Handler = Callable[[Request], Awaitable[Response]]


def make_app(service: Service) -> Starlette:
    """The application over a running worker."""
    routes = Routes(service)
    app = Starlette(
        routes=[
            Route("/health", routes.health, methods=["GET"]),
            Route("/metrics", routes.metrics, methods=["GET"]),
            Route("/version", routes.version, methods=["GET"]),
            Route("/openapi.json", routes.openapi, methods=["GET"]),
            Route("/v1/models", routes.models, methods=["GET"]),
            Route("/v1/models/{name:path}", routes.model, methods=["GET"]),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/v1/completions", routes.completions, methods=["POST"]),
        ],
        exception_handlers={ApiError: routes.api_error, HTTPException: routes.http_error},
    )
    return app


def parsed(kind: type[Kind], body: bytes) -> Kind:
    """Raises ApiError 400 for a body that is no JSON, or not this request's."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise invalid(error, list(kind.model_fields)) from error


class Routes:
    def __init__(self, service: Service) -> None:
        self.service = service

    async def health(self, request: Request) -> Response:
        return PlainTextResponse("", 200 if self.service.ready else 503)

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(exposition(self.service), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(description(self.service))

    async def models(self, request: Request) -> Response:
        self.service.check_key(request)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self.service.check_key(request)
        name = request.path_params["name"]
        if name != self.service.name:
            raise ApiError(404, f"The model `{name}` does not exist.", code="model_not_found", param="model")
        return JSONResponse(self._model())

    def _model(self) -> dict[str, object]:
        service = self.service
        return {
            "id": service.name,
            "object": "model",
            "created": int(service.started),
            "owned_by": "eyas",
            "max_model_len": service.context,
        }

    async def chat(self, request: Request) -> Response:
        ask = await self._ask(request, ChatRequest)
        return self._answer(ask, ChatShape, await self.service.chat_prompts(ask))

    async def completions(self, request: Request) -> Response:
        ask = await self._ask(request, CompletionRequest)
        return self._answer(ask, CompletionShape, await self.service.completion_prompts(ask))

    async def _ask(self, request: Request, kind: type[Kind]) -> Kind:
        self.service.check_key(request)
        ask = parsed(kind, await self.service.body(request))
        self.service.check_open(ask.model, ask.prompts * ask.choices)
        return ask

    def _answer(
        self, ask: ChatRequest | CompletionRequest, shape: type[Shape], prompts: list[tuple[int, ...]]
    ) -> Response:
        service = self.service
        service.check_open(ask.model, ask.prompts * ask.choices)
        jobs, pieces = service.jobs(ask, prompts)
        return Answering(service, shape(ask, service, prompts), jobs, pieces, bool(ask.stream))

    async def api_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError), "registered for ApiError"
        self.service.note_refused(error.status)
        return error.response

    async def http_error(self, request: Request, error: Exception) -> Response:
        """Unknown paths and methods."""
        assert isinstance(error, HTTPException), "registered for HTTPException"
        told = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        told.headers = dict(error.headers or {})
        return told.response
