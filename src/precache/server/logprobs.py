"""Log-probabilities in the shapes of the two endpoints."""

from __future__ import annotations

from collections.abc import Iterable

from precache.request import TokenLogprob
from precache.server.answers import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob
from precache.server.token_bytes import TokenBytes

_MIN_LOGPROB = -9999.0  # JSON knows no infinity


def chat_logprobs(tokens: Iterable[TokenLogprob], names: TokenBytes) -> ChatLogprobs:
    """The shape of ``/v1/chat/completions``."""
    content = []
    for token in tokens:
        own = _top(token.token_id, token.logprob, names)
        top = [_top(token_id, logprob, names) for token_id, logprob in token.top]
        content.append(
            ChatLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top)
        )
    return ChatLogprobs(content=content)


def _top(token_id: int, logprob: float, names: TokenBytes) -> TopLogprob:
    return TopLogprob(
        token=names.text(token_id),
        logprob=max(logprob, _MIN_LOGPROB),
        bytes=list(names(token_id)),
    )


class CompletionLogprobsBuilder:
    """The shape of ``/v1/completions``, built token by token: offsets count characters of the whole text."""

    def __init__(self, names: TokenBytes) -> None:
        self._names = names
        self._offset = 0

    def prompt(
        self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> CompletionLogprobs:
        """Those of an echoed prompt; its first token has none."""
        first = self._names.text(token_ids[0])
        rest = self.tokens(logprobs, start=len(first))
        return CompletionLogprobs(
            text_offset=[0, *rest.text_offset],
            token_logprobs=[None, *rest.token_logprobs],
            tokens=[first, *rest.tokens],
            top_logprobs=[None, *rest.top_logprobs],
        )

    def tokens(self, logprobs: Iterable[TokenLogprob], start: int = 0) -> CompletionLogprobs:
        """Those of the next tokens."""
        self._offset += start
        answer = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for token in logprobs:
            text = self._names.text(token.token_id)
            answer.text_offset.append(self._offset)
            answer.token_logprobs.append(max(token.logprob, _MIN_LOGPROB))
            answer.tokens.append(text)
            answer.top_logprobs.append(
                {self._names.text(i): max(logprob, _MIN_LOGPROB) for i, logprob in token.top}
            )
            self._offset += len(text)
        return answer


def joined(parts: Iterable[CompletionLogprobs]) -> CompletionLogprobs:
    """Several in a row as one."""
    whole = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for part in parts:
        whole.text_offset += part.text_offset
        whole.token_logprobs += part.token_logprobs
        whole.tokens += part.tokens
        whole.top_logprobs += part.top_logprobs
    return whole
