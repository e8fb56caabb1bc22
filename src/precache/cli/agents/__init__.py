"""`precache agents`: role agents work on a task's questions."""

from __future__ import annotations

from precache.cli.agents.command import add_parser

__all__ = ["add_parser"]
