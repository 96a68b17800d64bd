"""Errors as OpenAI shapes them: `{"error": {"message", "type", "param", "code"}}`."""

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
    """The first thing that is wrong with a request's body."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden" and param is not None:
        name = param.rpartition(".")[2]
        return ApiError(
            400, f"Unknown field: {name}{did_you_mean(name, fields)}", code="unknown_parameter", param=param
        )
    code = "invalid_json" if first["type"] == "json_invalid" else "invalid_value"
    return ApiError(400, message if param is None else f"{param}: {message}", code=code, param=param)
