"""Agents that take turns over one trajectory text: workflows as data, tools, clients, records.

Imports neither the engine nor the server: turns come from any OpenAI-compatible endpoint
(`HttpClient`) or from an engine that `EngineClient` is handed.
"""

from __future__ import annotations

from precache.agents.client import (
    CompletionClient,
    EndpointError,
    ForcedOutput,
    TurnOutput,
    TurnRefusedError,
    TurnRequest,
)
from precache.agents.corpus import Corpus
from precache.agents.endpoint import HttpClient
from precache.agents.inprocess import EngineClient
from precache.agents.loop import Episode, PlayOptions
from precache.agents.record import EpisodeRecord, ToolCall, TurnRecord
from precache.agents.tools import Tool, Toolbox, ToolError
from precache.agents.workflow import Workflow, WorkflowError, load_workflow, parse_workflow

__all__ = [
    "CompletionClient",
    "Corpus",
    "EndpointError",
    "EngineClient",
    "Episode",
    "EpisodeRecord",
    "ForcedOutput",
    "HttpClient",
    "PlayOptions",
    "Tool",
    "ToolCall",
    "ToolError",
    "Toolbox",
    "TurnOutput",
    "TurnRecord",
    "TurnRefusedError",
    "TurnRequest",
    "Workflow",
    "WorkflowError",
    "load_workflow",
    "parse_workflow",
]
