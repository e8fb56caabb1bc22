"""The OpenAI-compatible server: one process, one port, one model name per adapter plus the base model's."""

from precache.server.app import build_app
from precache.server.run import run_app
from precache.server.settings import ServerSettings

__all__ = ["ServerSettings", "build_app", "run_app"]
