"""What the server is told at its start. Read once by the command line, checked here, then frozen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from precache.access import check_key, is_loopback
from precache.errors import ConfigError


@dataclass(frozen=True)
class ServerSettings:
    """Names, keys and limits of one server.

    ``base_name`` is what the model without an adapter is called. Without ``api_keys`` everything but the admin routes
    is open, which is allowed on a loopback address only. ``adapter_root`` is the folder that adapters may be loaded
    from at run time (None: none). ``max_queue`` requests wait at most; ``request_timeout_s`` counts from their arrival.
    ``shutdown_grace_s`` is how long a running request may go on after SIGTERM. Raises ConfigError.
    """

    base_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    adapter_root: Path | None = None
    max_queue: int = 64
    request_timeout_s: float = 600.0
    shutdown_grace_s: float = 10.0
    max_body_bytes: int = 4 * 2**20

    def __post_init__(self) -> None:
        if not self.base_name:
            raise ConfigError("served model name", self.base_name, "a non-empty name")
        _check_range("port", self.port, 0, 65535)
        _check_range("max_queue", self.max_queue, 0, 100_000)
        _check_range("request_timeout", self.request_timeout_s, 0.001, 7 * 86400)
        _check_range("shutdown_grace", self.shutdown_grace_s, 0, 3600)
        _check_range("max_body", self.max_body_bytes, 1024, 2**30)
        for key in self.api_keys:
            check_key("--api-key", key)
        if self.admin_key is not None:
            check_key("--admin-key", self.admin_key)
        if not self.api_keys and not is_loopback(self.host):
            raise ConfigError(
                "--host",
                self.host,
                "a loopback address (127.0.0.1, ::1, localhost) unless an API key is set: anybody who reaches "
                "the port could use the server",
            )
        if self.adapter_root is not None and not self.adapter_root.is_dir():
            raise ConfigError("--adapter-root", str(self.adapter_root), "an existing folder")


def _check_range(field: str, got: float, low: float, high: float) -> None:
    if not low <= got <= high:
        raise ConfigError(field, got, f"{low:g} to {high:g}")
