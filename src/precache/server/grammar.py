"""JSON and tool calls by grammar, through llguidance. Everything that knows llguidance is here."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from precache.chat import ChatTokenizer
from precache.engine.sampler import LogitsMask
from precache.server.errors import ApiError

MAX_GRAMMAR_CHARS = 65_536
_WHITESPACE = r"[\x20\x0A\x0D\x09]{0,16}"  # a model that only says blanks must end some day


class GrammarFailedError(Exception):
    """The matcher refused a token that its own mask allowed: a bug, or a limit of the grammar."""


class Grammars:
    """Compiles grammars for one tokenizer, which is built at the first one (about a second)."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ll: LLTokenizer | None = None
        self._lock = threading.Lock()

    def json_schema(self, schema: dict[str, Any], param: str) -> Callable[[], LogitsMask]:
        """Output that is valid under a JSON schema. Raises ApiError naming ``param``."""
        try:
            grammar = LLMatcher.grammar_from_json_schema(_compact(schema))
        except ValueError as error:
            raise ApiError(400, f"{param}: {error}", param=param) from error
        return self._checked(grammar, param)

    def lark(self, grammar: str, param: str) -> Callable[[], LogitsMask]:
        """Output of a Lark grammar. Raises ApiError naming ``param``."""
        return self._checked(LLMatcher.grammar_from_lark(grammar), param)

    def _checked(self, grammar: str, param: str) -> Callable[[], LogitsMask]:
        if len(grammar) > MAX_GRAMMAR_CHARS:
            text = f"{param}: got a grammar of {len(grammar)} characters, allowed are {MAX_GRAMMAR_CHARS}"
            raise ApiError(400, text, param=param)
        tokenizer = self._compiled_tokenizer()
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ApiError(400, f"{param}: {matcher.get_error()}", param=param)
        return lambda: _GrammarMask(matcher.deep_copy())

    def _compiled_tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._ll is None:
                self._ll = LLTokenizer(
                    self._tokenizer.backend.to_str(),
                    n_vocab=self._tokenizer.vocab_size,
                    eos_token=sorted(self._tokenizer.eos_token_ids),
                )
        return self._ll


class _GrammarMask:
    """The state of one turn's grammar, as a LogitsMask."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._consumed = 0

    def __call__(self, output_ids: Sequence[int], logits: Tensor) -> Tensor:
        for token_id in output_ids[self._consumed :]:
            if not self._matcher.consume_token(token_id):
                raise GrammarFailedError(self._matcher.get_error())
        self._consumed = len(output_ids)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise GrammarFailedError(self._matcher.get_error())
        allowed = np.unpackbits(bits, bitorder="little")[: logits.shape[-1]].astype(bool)
        return logits.masked_fill(~torch.from_numpy(allowed).to(logits.device), -torch.inf)


def lark_json(schema: dict[str, Any]) -> str:
    """A JSON schema as a term of a Lark grammar."""
    return "%json " + json.dumps(_compact(schema))


def _compact(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}}
