"""One trajectory's cache in one safetensors file, with the digests of everything it depends on."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from precache.cache.layout import StripLayout
from precache.cache.store import TrajectoryStore
from precache.cache.trajectory import Trajectory, Writer, WriterRun
from precache.errors import CacheFileError

FORMAT = "precache-session-1"
_MAX_METADATA = 16 * 2**20


@dataclass(frozen=True)
class CacheOwner:
    """What a cache depends on: the model, the policy, the strips that are kept and the adapters (name -> digest).

    ``defers`` says whether the policy has a pass for tokens that are pending.
    """

    model_digest: str
    vocab_size: int
    policy: str
    strips: Mapping[str, StripLayout]
    adapters: Mapping[str, str]
    namespaces: frozenset[str]
    defers: bool


def save_trajectory(trajectory: Trajectory, path: str | Path, owner: CacheOwner) -> None:
    """Write a trajectory, atomically. Raises CacheFileError if it is empty or the file cannot be written."""
    length, pending = trajectory.length, trajectory.pending_from
    if length == 0:
        raise CacheFileError(f"session {trajectory.session_id} cannot be saved: it holds 0 tokens")
    tensors = {"token_ids": torch.from_numpy(trajectory.token_ids.copy())}
    for layer, (k, v) in enumerate(zip(trajectory.base.k, trajectory.base.v, strict=True)):
        tensors[f"k.{layer}"] = k[:, :length].contiguous()
        tensors[f"v.{layer}"] = v[:, :length].contiguous()
    for index, strip in enumerate(trajectory.strips.values()):
        for kind, parts in strip.parts():
            for layer, part in enumerate(parts):
                if part is not None:
                    tensors[f"strip.{index}.{kind}.{layer}"] = _computed(
                        part, strip.covered, length
                    )
    metadata = {
        "format": FORMAT,
        "model": owner.model_digest,
        "policy": owner.policy,
        "namespace": trajectory.namespace,
        "pending_from": None if pending is None or pending >= length else pending,
        "runs": [
            [run.start, run.end, run.writer.name, run.writer.digest] for run in trajectory.runs
        ],
        "strips": [[key, strip.covered] for key, strip in trajectory.strips.items()],
    }
    _write(Path(path), tensors, {"precache": json.dumps(metadata)})


def _computed(part: Tensor, covered: list[tuple[int, int]], length: int) -> Tensor:
    """The first rows of a strip's tensor, zeros where nothing was computed and memory holds anything."""
    rows = torch.zeros_like(part[:length])
    for low, high in covered:
        rows[low:high] = part[low:high]
    return rows


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        os.close(handle)
        try:
            save_file({key: tensor.cpu() for key, tensor in tensors.items()}, name, metadata)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except (OSError, SafetensorError) as error:
        raise CacheFileError(f"session cannot be saved to {path}: {error}") from error


def load_trajectory(store: TrajectoryStore, path: str | Path, owner: CacheOwner) -> Trajectory:
    """Read a trajectory into the store. Raises CacheFileError and CacheBudgetError; the store is unharmed then."""
    try:
        with safe_open(str(path), framework="pt") as file:
            saved = _SavedSession(str(path), file, owner)
            return saved.restore(store)
    except (OSError, SafetensorError) as error:
        raise CacheFileError(f"session {path} cannot be read: {error}") from error


class _SavedSession:
    """A saved session whose every claim is checked before the store is touched."""

    def __init__(self, path: str, file: Any, owner: CacheOwner) -> None:
        self._path = path
        self._file = file
        self._owner = owner
        self._names = set(file.keys())
        self._facts = self._metadata()
        self._check_owner()
        self._token_ids = self._tokens()
        self._runs = self._writer_runs()
        self._strips = self._strip_ranges()
        self._pending = self._pending_from()

    @property
    def _length(self) -> int:
        return len(self._token_ids)

    def _fail(self, what: str, got: object, allowed: object) -> CacheFileError:
        return CacheFileError(
            f"session {self._path} does not fit: {what} is {got!r}, allowed is {allowed!r}"
        )

    def _metadata(self) -> dict[str, Any]:
        text = (self._file.metadata() or {}).get("precache", "")
        if not text or len(text) > _MAX_METADATA:
            raise self._fail("metadata", f"{len(text)} characters", "a precache session's")
        try:
            facts = json.loads(text)
        except ValueError as error:
            raise self._fail("metadata", text[:80], "JSON") from error
        expected = {"format", "model", "policy", "namespace", "pending_from", "runs", "strips"}
        if not isinstance(facts, dict) or set(facts) != expected:
            raise self._fail("metadata", text[:80], sorted(expected))
        return facts

    def _check_owner(self) -> None:
        owner = self._owner
        for what, allowed in (
            ("format", FORMAT),
            ("model", owner.model_digest),
            ("policy", owner.policy),
        ):
            if self._facts[what] != allowed:
                raise self._fail(what, self._facts[what], allowed)
        if self._facts["namespace"] not in list(owner.namespaces):
            raise self._fail("namespace", self._facts["namespace"], sorted(owner.namespaces))

    def _tokens(self) -> list[int]:
        if "token_ids" not in self._names:
            raise self._fail("token_ids", "missing", "present")
        tensor = self._file.get_tensor("token_ids")
        if tensor.dtype != torch.int32 or tensor.dim() != 1 or tensor.numel() == 0:
            raise self._fail("token_ids", (tensor.dtype, list(tensor.shape)), "int32 [length >= 1]")
        token_ids: list[int] = tensor.tolist()
        if min(token_ids) < 0 or max(token_ids) >= self._owner.vocab_size:
            raise self._fail(
                "token_ids", (min(token_ids), max(token_ids)), (0, self._owner.vocab_size - 1)
            )
        return token_ids

    def _writer_runs(self) -> list[WriterRun]:
        runs, position = [], 0
        try:
            for start, end, name, digest in self._facts["runs"]:
                _require_integers(start, end)
                if start != position or not start < end <= self._length:
                    raise ValueError("runs are not consecutive")
                if name in self._owner.adapters and self._owner.adapters[name] != digest:
                    raise self._fail(f"adapter {name!r}", digest, self._owner.adapters[name])
                runs.append(WriterRun(start, end, Writer(str(name), str(digest))))
                position = end
        except (TypeError, ValueError) as error:
            raise self._fail("runs", str(error), f"consecutive, 0 to {self._length}") from error
        if position != self._length:
            raise self._fail("runs", f"0 to {position}", f"0 to {self._length}")
        return runs

    def _pending_from(self) -> int | None:
        pending = self._facts["pending_from"]
        if pending is None:
            return None
        if type(pending) is not int or not 0 <= pending < self._length:
            raise self._fail("pending_from", pending, f"null or 0 to {self._length - 1}")
        if not self._owner.defers:
            raise self._fail("pending_from", pending, "null under this policy")
        return pending

    def _strip_ranges(self) -> list[tuple[StripLayout, list[tuple[int, int]]]]:
        strips = []
        try:
            for key, covered in self._facts["strips"]:
                if key not in list(self._owner.strips):
                    raise self._fail("a strip's adapter", key, sorted(self._owner.strips))
                ranges = [(low, high) for low, high in covered]
                _require_integers(*(bound for bounds in ranges for bound in bounds))
                if any(not 0 <= low < high <= self._length for low, high in ranges):
                    raise self._fail("a strip's range", ranges, f"0 to {self._length}")
                layout = self._owner.strips[key]
                # No pass fills a gap among hidden states: whoever runs a token first keeps them.
                if any(layout.h_widths) and ranges != [(0, self._length)]:
                    raise self._fail("a strip's range", ranges, [(0, self._length)])
                strips.append((layout, ranges))
        except (TypeError, ValueError) as error:
            raise self._fail("strips", str(error), "[key, [[start, end], ...]] of each") from error
        held = {layout.key for layout, _ in strips}
        for key, layout in self._owner.strips.items():
            if any(layout.h_widths) and key not in held:
                raise self._fail("strips", sorted(held), f"one of {key!r}")
        return strips

    def restore(self, store: TrajectoryStore) -> Trajectory:
        """Copy the file's tensors into a new trajectory, or leave the store as it was."""
        trajectory = store.create(self._facts["namespace"])
        try:
            store.reserve(trajectory, self._length, [layout for layout, _ in self._strips])
            self._fill(trajectory)
        except BaseException:
            store.trajectories.remove(trajectory)
            raise
        return trajectory

    def _fill(self, trajectory: Trajectory) -> None:
        for layer, (k, v) in enumerate(zip(trajectory.base.k, trajectory.base.v, strict=True)):
            self._copy(f"k.{layer}", k[:, : self._length])
            self._copy(f"v.{layer}", v[:, : self._length])
        for index, (layout, ranges) in enumerate(self._strips):
            strip = trajectory.strips[layout.key]
            for kind, parts in strip.parts():
                for layer, part in enumerate(parts):
                    if part is not None:
                        self._copy(f"strip.{index}.{kind}.{layer}", part[: self._length])
            for low, high in ranges:
                strip.cover(low, high)
        for run in self._runs:
            trajectory.commit(self._token_ids[run.start : run.end], run.writer)
        trajectory.pending_from = self._pending

    def _copy(self, name: str, target: Tensor) -> None:
        if name not in self._names:
            raise self._fail(name, "missing", list(target.shape))
        source = self._file.get_tensor(name)
        if source.shape != target.shape or source.dtype != target.dtype:
            raise self._fail(
                name, (list(source.shape), source.dtype), (list(target.shape), target.dtype)
            )
        if not bool(torch.isfinite(source).all()):
            raise self._fail(name, "NaN or Inf", "finite values")
        target.copy_(source)


def _require_integers(*values: object) -> None:
    for value in values:
        if type(value) is not int:
            raise TypeError(f"{value!r} is no position")
