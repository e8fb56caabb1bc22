"""Exceptions to HTTP answers in the shape of OpenAI's API: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from precache.adapters.bank import AdapterNameError
from precache.errors import (
    AdapterError,
    AdapterExistsError,
    CacheBudgetError,
    ContextLengthError,
    EngineClosedError,
    InvalidRequestError,
    NonFiniteLogitsError,
    PolicyNotAllowedError,
    PrecacheError,
    SamplingParamsError,
    UnknownAdapterError,
)

_log = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 1000
REASON = "precache.reason"  # key in a request's scope: why the answer is an error
_SHOWN_ERRORS = 3  # of one invalid body
_INVALID = "invalid_request_error"
_SERVER = "server_error"


class ApiError(Exception):
    """An answer that is an error: ``status``, and what the body and the headers say."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = printable(message)
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        if self.status == 401 or self.status == 403:
            return "authentication_error"
        return _SERVER if self.status >= 500 else _INVALID

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self, scope: MutableMapping[str, Any]) -> JSONResponse:
        """The answer to the request of that scope, which keeps the reason for those that count."""
        scope[REASON] = self.code or self.kind
        return JSONResponse(self.body(), self.status, headers=self.headers)


class ModelNotFoundError(ApiError):
    """No agent has that name; the answer lists those there are."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        message = f"the model {name!r} does not exist; served are {list(known)}"
        super().__init__(404, message, code="model_not_found", param="model")


class OverloadedError(ApiError):
    """The server cannot take the request now; it says when to come again."""

    def __init__(self, message: str, code: str, retry_after_s: int) -> None:
        super().__init__(503, message, code=code, headers={"Retry-After": str(retry_after_s)})


def printable(text: str) -> str:
    """The text at a bounded length, as characters that every encoder takes."""
    short = text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + " ..."
    return short.encode("utf-8", "backslashreplace").decode()


def api_error(error: Exception) -> ApiError:
    """The answer to an exception. What is not known is logged and becomes a 500 that tells nothing."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PrecacheError):
        known = _known_error(error)
        if known is not None:
            return known
    _log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed on this request; its log says why", code="internal")


def _known_error(error: PrecacheError) -> ApiError | None:
    text = str(error)
    match error:
        case UnknownAdapterError():
            return ModelNotFoundError(error.name, tuple(error.known))
        case ContextLengthError():
            return ApiError(400, text, code="context_length_exceeded", param="max_tokens")
        case SamplingParamsError():
            return ApiError(400, text, param=error.field)
        case InvalidRequestError():
            return ApiError(400, text)
        case AdapterExistsError():
            text = f"the name {error.name!r} is taken by other weights; load_inplace=true replaces them"
            return ApiError(400, text, code="adapter_exists", param="lora_name")
        case AdapterNameError():
            return ApiError(400, text, code="adapter_refused", param="lora_name")
        case AdapterError() | PolicyNotAllowedError():
            return ApiError(400, text, code="adapter_refused", param="lora_path")
        case CacheBudgetError() if error.held == 0:
            return ApiError(400, text, code="cache_budget_exceeded", param="max_tokens")
        case CacheBudgetError():
            return OverloadedError(text, "cache_busy", 1)
        case EngineClosedError():
            return OverloadedError(text, "shutting_down", 5)
        case NonFiniteLogitsError():
            return ApiError(500, text, code="non_finite_logits")
    return None


def install_error_handlers(app: FastAPI) -> None:
    """Give every error of the app OpenAI's shape."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return _invalid_body(error).response(request.scope)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        answer = ApiError(error.status_code, str(error.detail), headers=error.headers)
        return answer.response(request.scope)

    @app.exception_handler(ApiError)
    @app.exception_handler(PrecacheError)
    async def known(request: Request, error: Exception) -> JSONResponse:
        return api_error(error).response(request.scope)

    @app.exception_handler(Exception)
    async def unknown(request: Request, _: Exception) -> JSONResponse:
        # Starlette raises the error again after this answer, and uvicorn logs it.
        answer = ApiError(500, "the server failed on this request", code="internal")
        return answer.response(request.scope)


def _invalid_body(error: RequestValidationError) -> ApiError:
    problems = [_problem(item) for item in error.errors()[:_SHOWN_ERRORS]]
    param = problems[0][0] or None
    text = "; ".join(f"{name}: {reason}" if name else reason for name, reason in problems)
    return ApiError(400, text, param=None if param is None else printable(param))


def _problem(item: Mapping[str, Any]) -> tuple[str, str]:
    """The field of one pydantic error and what is wrong with it."""
    name = ".".join(str(part) for part in item["loc"] if _is_field(part))
    if item["type"] == "extra_forbidden":
        return name, "not supported here, and it is not known to be harmless"
    if item["type"] == "json_invalid":
        return "", "the body is not valid JSON"
    return name, str(item["msg"]).removeprefix("Value error, ")


def _is_field(part: str | int) -> bool:
    """Pydantic's places also name where the body came from and which type of a union was tried."""
    if isinstance(part, int):
        return True
    return part.isidentifier() and part not in ("body", "path", "query", "str", "NamedTool")
