"""Errors as OpenAI shapes them: `{"error": {"message", "type", "param", "code"}}`."""

import re

from pydantic import ValidationError
from starlette.responses import JSONResponse

from eyas.errors import did_you_mean

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


FORM = re.compile(r"<\w+>|\[key\]")
"""What pydantic adds to a place: the form of a field (protocol.py), a dict's key."""
UNSUPPORTED = {
    "tools": "Tools",
    "tool_choice": "Tools",
    "tool_calls": "Tools",
    "tool_call_id": "Tools",
    "image_url": "Images",
    "input_audio": "Audio and other media",
    "audio": "Audio and other media",
    "file": "Files",
    "functions": "Functions",
    "function_call": "Functions",
    "response_format": "Answers in a format other than text",
    "modalities": "Answers other than text",
    "suffix": "Suffixes",
    "reasoning_effort": "Efforts of reasoning",
}
"""Fields of OpenAI's of which only the values that ask for nothing are taken (protocol.py)."""


class ApiError(Exception):
    """A request that is not served. `param` names the field, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.headers = status, message, code, param, headers

    @property
    def body(self) -> dict[str, object]:
        words = {"message": self.message, "type": TYPES.get(self.status, "invalid_request_error")}
        return {"error": {**words, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=self.headers)


def invalid(error: ValidationError, fields: list[str]) -> ApiError:
    """What is wrong with a request's body: what is asked for and not served, else the first mistake."""
    mistakes = error.errors(include_url=False)
    for path in (_path(mistake["loc"]) for mistake in mistakes):
        if asked := next((UNSUPPORTED[part] for part in path if part in UNSUPPORTED), None):
            words = f"{asked} are not supported by this server."
            return ApiError(400, words, code="unsupported_parameter", param=".".join(path))
    first = mistakes[0]
    path, message, context = _path(first["loc"]), first["msg"], first.get("ctx", {})
    if first["type"] == "at_odds":
        return ApiError(400, message, code=context["code"], param=context["param"])
    param = ".".join(path) or None
    if first["type"] == "extra_forbidden" and param is not None:
        words = f"Unknown field: {path[-1]}{did_you_mean(param, fields)}"
        return ApiError(400, words, code="unknown_parameter", param=param)
    code = "invalid_json" if first["type"] == "json_invalid" else "invalid_value"
    return ApiError(400, message if param is None else f"{param}: {message}", code=code, param=param)


def _path(location: tuple[int | str, ...]) -> tuple[str, ...]:
    return tuple(str(part) for part in location if not FORM.fullmatch(str(part)))
