"""`precache bench`: measure this machine. Each benchmark has a module here for its options and its table."""

from __future__ import annotations

from precache.cli.bench.command import add_parser

__all__ = ["add_parser"]
