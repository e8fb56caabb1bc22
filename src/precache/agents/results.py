"""The results file: a first line of settings, then one JSON line per episode. Killed runs go on from it.

A line is written whole and flushed; a line that a kill cut off is dropped when the file is opened
again. Episodes of another set of settings are never mixed in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from precache.errors import PrecacheError

Mode = Literal["natural", "forced"]


class ResultsFileError(PrecacheError):
    """The results file holds something else, or a run with other settings."""


class EpisodeKey(NamedTuple):
    """What makes an episode the same in a resumed run."""

    policy: str
    mode: Mode
    level: str
    question_id: str
    repeat: int


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """One finished episode: its key and either its record (natural) or its totals (forced)."""

    key: EpisodeKey
    seconds: float
    episode: Mapping[str, Any]


class ResultsFile:
    """An open results file. `done` are the episodes that it holds."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        settings = json.loads(json.dumps(settings))
        self.done: dict[EpisodeKey, EpisodeResult] = {}
        kept = self._read(settings) if path.exists() else ""
        path.parent.mkdir(parents=True, exist_ok=True)
        if kept:
            with path.open("r+", encoding="utf-8") as file:
                file.truncate(len(kept.encode("utf-8")))
        self._file = path.open("a" if kept else "w", encoding="utf-8")
        if not kept:
            self._write_line({"settings": settings})

    def append(self, result: EpisodeResult) -> None:
        """Write one episode to disk, at once."""
        self._write_line(
            {**result.key._asdict(), "seconds": result.seconds, "episode": result.episode}
        )
        self.done[result.key] = result

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _write_line(self, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(values, ensure_ascii=False) + "\n")
        self._file.flush()

    def _read(self, settings: Mapping[str, Any]) -> str:
        """Fill `done` and return the text that is kept: all whole lines."""
        whole, _, _ = self._path.read_text(encoding="utf-8").rpartition("\n")
        lines = whole.split("\n") if whole else []
        if not lines:
            return ""
        found = _parse(self._path, 1, lines[0]).get("settings")
        if not isinstance(found, dict):
            raise ResultsFileError(f"{self._path}, line 1: expected the settings of a run")
        if len(lines) == 1:
            return ""  # a run that never played: nothing to go on from
        self._check_settings(found, settings)
        for number, line in enumerate(lines[1:], start=2):
            result = _result(self._path, number, line)
            self.done[result.key] = result
        return whole + "\n"

    def _check_settings(self, found: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        for name in sorted({*found, *settings}):
            if found.get(name) != settings.get(name):
                raise ResultsFileError(
                    f"{self._path} holds a run with {name}={found.get(name)!r}, this one has "
                    f"{settings.get(name)!r}; write to another file"
                )


def read_results(path: Path) -> list[EpisodeResult]:
    """Return the episodes of a results file. Raises ResultsFileError naming the line."""
    try:
        whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    except OSError as error:
        raise ResultsFileError(f"{path} cannot be read: {error}") from error
    lines = whole.split("\n")[1:]
    return [_result(path, number, line) for number, line in enumerate(lines, start=2)]


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ResultsFileError(f"{path}, line {number}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ResultsFileError(f"{path}, line {number}: got {line[:60]!r}, expected an object")
    return values


def _result(path: Path, number: int, line: str) -> EpisodeResult:
    values = _parse(path, number, line)
    try:
        key = EpisodeKey(*(values[name] for name in EpisodeKey._fields))
        return EpisodeResult(key, values["seconds"], values["episode"])
    except KeyError as error:
        raise ResultsFileError(f"{path}, line {number}: no key {error}") from error
