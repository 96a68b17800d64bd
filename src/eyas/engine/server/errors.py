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


UNION = re.compile(r"str|constrained-\w+|list\[.*|\[key\]")
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
    """What is wrong with a request's body: of the first field's mistakes the one furthest in."""
    mistakes = [(_path(one["loc"]), one["type"], one["msg"]) for one in error.errors(include_url=False)]
    unsupported = next((path for path, *_ in mistakes if UNSUPPORTED.keys() & set(path)), None)
    if unsupported is not None:
        asked = next(UNSUPPORTED[part] for part in unsupported if part in UNSUPPORTED)
        words = f"{asked} are not supported by this server."
        return ApiError(400, words, code="unsupported_parameter", param=".".join(unsupported))
    first = mistakes[0][0]
    # Of a union's members the one whose type is right is meant: an empty list is no bad string.
    path, kind, message = max(
        (mistake for mistake in mistakes if mistake[0][: len(first)] == first),
        key=lambda mistake: (len(mistake[0]), not mistake[1].endswith("_type")),
    )
    param = ".".join(path) or None
    if kind == "extra_forbidden" and param is not None:
        words = f"Unknown field: {path[-1]}{did_you_mean(path[-1], fields)}"
        return ApiError(400, words, code="unknown_parameter", param=param)
    code = "invalid_json" if kind == "json_invalid" else "invalid_value"
    message = message.removeprefix("Value error, ")
    return ApiError(400, message if param is None else f"{param}: {message}", code=code, param=param)


def _path(location: tuple[int | str, ...]) -> tuple[str, ...]:
    """Where a mistake is, without pydantic's names of a union's members."""
    return tuple(str(part) for part in location if not UNION.fullmatch(str(part)))
