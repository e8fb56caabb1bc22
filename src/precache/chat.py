"""Text to token ids and back.

Owns: prompts (text, chat messages, ids) -> ids, ids -> text piece by piece, and where a stop string ends that text.
The engine itself sees ids only. Does not own: which ids the model may take (the engine knows its vocabulary), sampling.

Two rules keep ids, and with them the shared cache, the same for everyone:

* Templated text is tokenised without added special tokens: the template wrote its own BOS, there is never a second.
* What a user writes inside a message is text. ``<|im_end|>`` typed into a message becomes the characters ``<``, ``|``,
  ...; it never ends the turn. A tokenizer that cannot do this refuses the message. A prompt given as one plain string
  is the caller's own template, so control tokens in it are control tokens.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from precache.errors import EmptyPromptError, InvalidRequestError, ModelError, TokenIdError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[Message] | Sequence[int]

_INCOMPLETE = "\ufffd"  # what an unfinished UTF-8 sequence decodes to
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode noncharacters: never in real text


class ChatTemplateError(InvalidRequestError):
    """The model's chat template does not accept these messages."""

    def __init__(self, roles: Sequence[str], reason: str) -> None:
        self.roles = list(roles)
        self.reason = reason
        super().__init__(f"chat template refused the roles {self.roles}: {reason}")


class ChatMessageError(InvalidRequestError):
    """One message is not of the form that is understood."""

    def __init__(self, position: int, reason: str) -> None:
        self.position = position
        self.reason = reason
        super().__init__(f"message {position}: {reason}")


@dataclass(frozen=True)
class Divergence:
    """Where two prompts stop being the same: everything after ``position`` cannot be shared between them."""

    position: int
    first_tokens: int
    second_tokens: int
    before: str
    first: str
    second: str

    def __str__(self) -> str:
        return (
            f"the prompts share {self.position} tokens of {self.first_tokens} and "
            f"{self.second_tokens}; after {self.before!r} one goes on with {self.first!r}, "
            f"the other with {self.second!r}"
        )


class ChatTokenizer:
    """The tokenizer of one model. Calls do not change it.

    ``vocab_size`` is the number of ids the model takes, where that is not the tokenizer's own count;
    ``eos_token_ids`` come from the model's generation config and are joined with the tokenizer's.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        vocab_size: int | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        # A saved length limit would be taken off by the first call, which fails if another thread encodes just then.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.vocab_size = len(tokenizer) if vocab_size is None else vocab_size
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.eos_token_ids = frozenset((*own, *eos_token_ids))
        added = tokenizer.added_tokens_decoder
        self.special_tokens = {str(added[i].content): i for i in added if added[i].special}

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        vocab_size: int | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> ChatTokenizer:
        """Load the tokenizer of a local folder or a hub id.

        Raises ModelError where there is none, or none of the fast kind.
        """
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(path))
        except (OSError, ValueError) as error:
            raise ModelError(f"no tokenizer could be loaded from {path}: {error}") from error
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(
                f"the tokenizer of {path} has no tokenizer.json; only those are supported"
            )
        return cls(
            cast("PreTrainedTokenizerFast", tokenizer),
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
        )

    @property
    def backend(self) -> Tokenizer:
        """The tokenizer of the library ``tokenizers`` behind this one, to read from."""
        return self._tokenizer.backend_tokenizer

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a text, of chat messages, or of checked token ids.

        Raises EmptyPromptError, TokenIdError, ChatMessageError, ChatTemplateError.
        """
        if isinstance(prompt, str):
            ids = self._encode(prompt, add_special_tokens=True)
        elif isinstance(prompt, Mapping):
            raise InvalidRequestError("prompt: got one message, allowed is a list of messages")
        elif len(prompt) > 0 and isinstance(prompt[0], Mapping):
            ids = self._encode_messages(cast("Sequence[Message]", prompt))
        else:
            ids = self._checked_ids(prompt)
        if not ids:
            raise EmptyPromptError
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids; special tokens have none."""
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return cast("str", text)

    def find_divergence(
        self, first: Prompt, second: Prompt, num_context: int = 8
    ) -> Divergence | None:
        """Return where two prompts stop sharing tokens, or None if they are equal.

        A role text or a clock at the front of a prompt makes every later token miss the cache; this names the place.
        """
        a, b = self.encode_prompt(first), self.encode_prompt(second)
        if a == b:
            return None
        shared = _num_shared(a, b)
        return Divergence(
            position=shared,
            first_tokens=len(a),
            second_tokens=len(b),
            before=self._decode_all(a[max(0, shared - num_context) : shared]),
            first=self._decode_all(a[shared : shared + num_context]),
            second=self._decode_all(b[shared : shared + num_context]),
        )

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        return cast("list[int]", encoded["input_ids"])

    def _decode_all(self, token_ids: list[int]) -> str:
        return cast("str", self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))

    def _checked_ids(self, prompt: Iterable[object]) -> list[int]:
        return [self._checked_id(got, position) for position, got in enumerate(prompt)]

    def _checked_id(self, got: object, position: int) -> int:
        try:
            token_id = -1 if isinstance(got, bool) else operator.index(cast("int", got))
        except TypeError:
            token_id = -1
        if not 0 <= token_id < self.vocab_size:
            raise TokenIdError(got, position, self.vocab_size)
        return token_id

    def _encode_messages(self, messages: Sequence[Message]) -> list[int]:
        plain = [_plain_message(message, position) for position, message in enumerate(messages)]
        guard = _Guard(self.special_tokens, plain)
        text = self._render(guard.messages)
        if not guard.used:
            return self._encode(text, add_special_tokens=False)
        # Only where a message holds a control token: the text around the template's own control tokens is encoded
        # apart, by a tokenizer that does not look for any. Checked on harmless text first.
        harmless = guard.restore(text, harmless=True)
        if self._encode_apart(harmless) != self._encode(harmless, add_special_tokens=False):
            raise InvalidRequestError(
                f"a message holds {guard.used}; this model's tokenizer would read it as a control token, "
                "allowed is any other text"
            )
        return self._encode_apart(text, guard)

    def _render(self, messages: list[dict[str, Any]]) -> str:
        if not self._tokenizer.chat_template:
            raise InvalidRequestError(
                "the tokenizer has no chat template: got chat messages, "
                "allowed are a text or token ids"
            )
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ChatTemplateError([m["role"] for m in messages], str(error)) from error
        return cast("str", text)

    def _encode_apart(self, text: str, guard: _Guard | None = None) -> list[int]:
        """Encode templated text whose control tokens are the template's; a guard puts the users' back as text."""
        ids: list[int] = []
        for piece in self._special_pattern.split(text):
            if piece in self.special_tokens:
                ids.append(self.special_tokens[piece])
            elif piece:
                literal = piece if guard is None else guard.restore(piece)
                ids += self._literal.encode(literal, add_special_tokens=False).ids
        return ids

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return re.compile(f"({_alternatives(self.special_tokens)})")

    @cached_property
    def _literal(self) -> Tokenizer:
        """A copy of the tokenizer that takes every special token for text."""
        from tokenizers import Tokenizer

        copy = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        copy.no_truncation()
        copy.no_padding()
        copy.encode_special_tokens = True
        return copy


class _Guard:
    """Messages in which every special token has been swapped for a placeholder that no template touches."""

    def __init__(self, special_tokens: Iterable[str], messages: list[dict[str, Any]]) -> None:
        self._tokens = list(special_tokens)
        self._pattern = re.compile(_alternatives(self._tokens)) if self._tokens else None
        self._mark = _unused_mark(messages)
        self.used: list[str] = []
        self.messages: list[dict[str, Any]] = [self._swap(message) for message in messages]

    def restore(self, text: str, *, harmless: bool = False) -> str:
        """Put the tokens back, or a harmless word in the place of each."""
        return re.sub(
            f"{self._mark}(\\d+){self._mark}",
            lambda found: "word" if harmless else self._tokens[int(found[1])],
            text,
        )

    def _swap(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(self._placeholder, value) if self._pattern else value
        if isinstance(value, Mapping):
            return {key: self._swap(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._swap(item) for item in value]
        return value

    def _placeholder(self, found: re.Match[str]) -> str:
        if found[0] not in self.used:
            self.used.append(found[0])
        return f"{self._mark}{self._tokens.index(found[0])}{self._mark}"


def _unused_mark(messages: list[dict[str, Any]]) -> str:
    used = set().union(*_texts(messages))
    mark = next((mark for mark in _MARKS if mark not in used), None)
    if mark is None:
        raise InvalidRequestError("the messages hold every Unicode noncharacter, allowed is text")
    return mark


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _alternatives(tokens: Iterable[str]) -> str:
    return "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True))


def _plain_message(message: object, position: int) -> dict[str, Any]:
    """A message whose content is one string; its other fields (``name``, ``tool_calls``, ...) go to the template."""
    if not isinstance(message, Mapping):
        raise ChatMessageError(position, f"got {type(message).__name__}, allowed is a mapping")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ChatMessageError(position, f"role: got {role!r}, allowed is a non-empty string")
    if isinstance(content, list | tuple):
        content = "".join(_part_text(part, position) for part in content)
    elif not isinstance(content, str | None):
        got = type(content).__name__
        raise ChatMessageError(position, f"content: got {got}, allowed are text and text parts")
    return {**message, "role": role, "content": content}


def _part_text(part: object, position: int) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise ChatMessageError(position, f"content part: got type {kind!r}, allowed is 'text'")
    return text


def _num_shared(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (left, right) in pairs if left != right), min(len(a), len(b)))


class IncrementalDecoder:
    """Turns sampled ids into text piece by piece, never splitting a character.

    The pieces joined are ``tokenizer.decode`` of all ids. Ids are decoded in a short window: the last piece gives
    the context that a tokenizer may need (a leading space), what follows it is new.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_read = 0  # leading ids of the window whose text is out

    def push(self, token_id: int) -> str:
        """Add one id and return the text it completes, which may be none."""
        self._window.append(token_id)
        text = self._new_text()
        if not text or text.endswith(_INCOMPLETE):
            return ""
        del self._window[: self._num_read]
        self._num_read = len(self._window)
        return text

    def flush(self) -> str:
        """Return what is still held: an unfinished character comes out as U+FFFD."""
        text = self._new_text()
        self._num_read = len(self._window)
        return text

    def _new_text(self) -> str:
        old = self._tokenizer.decode(self._window[: self._num_read])
        return self._tokenizer.decode(self._window)[len(old) :]


class StopMatcher:
    """Ends a text before the first stop string.

    The stop string that is complete first wins, so the cut does not depend on how the text was cut into pieces.
    Only text that may still become a stop string is held back.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; return what can be shown of it, and whether a stop string has been reached."""
        if self._stopped:
            return "", True
        self._held += text
        cut = self._first_stop()
        self._stopped = cut is not None
        num_safe = len(self._held) - self._num_open() if cut is None else cut
        safe, self._held = self._held[:num_safe], self._held[num_safe:]
        return safe, self._stopped

    def flush(self) -> str:
        """Return the text held back, once it is known that nothing follows."""
        held = "" if self._stopped else self._held
        self._held = ""
        return held

    def _first_stop(self) -> int | None:
        found = [(self._held.find(stop), len(stop)) for stop in self._stop]
        ends = [(start + length, start) for start, length in found if start >= 0]
        return min(ends)[1] if ends else None

    def _num_open(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        longest = max(map(len, self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if self._held.endswith(tuple(stop[:length] for stop in self._stop)):
                return length
        return 0
