"""The bytes behind single tokens, for logprobs: a token may be half a character."""

from __future__ import annotations

import json
import re
from functools import lru_cache

from precache.chat import ChatTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # how SentencePiece writes a blank


class TokenBytes:
    """Looks tokens up in one tokenizer; byte-level BPE and SentencePiece with byte fallback are understood."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._backend = tokenizer.backend
        self._special = {i: text for text, i in tokenizer.special_tokens.items()}
        decoder = json.loads(self._backend.to_str()).get("decoder")
        self._byte_level = "ByteLevel" in json.dumps(decoder)

    def __call__(self, token_id: int) -> bytes:
        """The bytes of a token; a special token's are its name, an unknown id's are none."""
        token = self._special.get(token_id) or self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._special:
            return token.encode()
        if self._byte_level:
            table = _byte_table()
            if all(char in table for char in token):
                return bytes(table[char] for char in token)
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else token.replace(_SPACE, " ").encode()

    def text(self, token_id: int) -> str:
        """The token as text; bytes that are no whole character are U+FFFD."""
        return self(token_id).decode("utf-8", "replace")


@lru_cache(maxsize=1)
def _byte_table() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}
