"""The exceptions that callers meet. Modules raise some of their own, each below one of these (AdapterNameError, ...).

    PrecacheError
    ├── InvalidRequestError        a request cannot be served as written
    │   ├── EmptyPromptError
    │   ├── ContextLengthError
    │   ├── TokenIdError
    │   ├── SamplingParamsError
    │   └── UnknownAdapterError
    ├── AdapterError               an adapter folder cannot be used
    │   ├── AdapterFormatError     unreadable, not safetensors, missing files
    │   ├── UnsupportedAdapterError   PEFT features that are not implemented (all of them named)
    │   ├── AdapterShapeError      made for another base model
    │   ├── NonFiniteAdapterError  NaN or Inf in a tensor
    │   └── AdapterExistsError
    ├── ModelError                 the base model cannot be used
    │   └── UnsupportedModelError
    ├── PolicyError                the policy does not exist or does not fit the adapters
    │   ├── UnknownPolicyError
    │   └── PolicyNotAllowedError
    ├── ConfigError                a setting is wrong
    ├── CacheError
    │   ├── CacheBudgetError       the request does not fit into the memory budget
    │   ├── CacheFileError         a saved cache is corrupt or belongs to something else
    │   └── UnknownSessionError
    ├── NonFiniteLogitsError       the model produced NaN or Inf for one request
    ├── TurnCancelledError         somebody cancelled the turn while it ran
    └── EngineClosedError

Messages say what was given, what was got and what is allowed. Values that a caller may want to act on are attributes.
"""

from __future__ import annotations

from collections.abc import Iterable


class PrecacheError(Exception):
    """Base of all precache errors."""


class InvalidRequestError(PrecacheError):
    """A request that cannot be served as written; nothing was changed."""


class EmptyPromptError(InvalidRequestError):
    """The prompt holds no token."""

    def __init__(self) -> None:
        super().__init__("the prompt is empty: got 0 tokens, need at least 1")


class ContextLengthError(InvalidRequestError):
    """Prompt and output do not fit into the context window of the model."""

    def __init__(self, prompt_tokens: int, max_tokens: int | None, limit: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.limit = limit
        asked = "" if max_tokens is None else f" and max_tokens={max_tokens}"
        super().__init__(
            f"context length exceeded: got {prompt_tokens} prompt tokens{asked}, "
            f"the context window is {limit} tokens for prompt and output together"
        )


class TokenIdError(InvalidRequestError):
    """A token id outside the vocabulary."""

    def __init__(self, token_id: object, position: int, vocab_size: int) -> None:
        self.token_id = token_id
        self.position = position
        self.vocab_size = vocab_size
        super().__init__(
            f"token id out of range: got {token_id!r} at position {position}, "
            f"allowed are integers from 0 to {vocab_size - 1}"
        )


class SamplingParamsError(InvalidRequestError):
    """A sampling parameter outside its range."""

    def __init__(self, field: str, got: object, allowed: str) -> None:
        self.field = field
        self.got = got
        self.allowed = allowed
        super().__init__(f"{field}: got {got!r}, allowed is {allowed}")


class UnknownAdapterError(InvalidRequestError):
    """No adapter of that name is loaded."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = sorted(known)
        super().__init__(f"unknown adapter: got {name!r}, loaded are {self.known}")


class AdapterError(PrecacheError):
    """An adapter folder that cannot be used; nothing was loaded."""


class AdapterFormatError(AdapterError):
    """The adapter's files are missing, unreadable or not safetensors."""


class UnsupportedAdapterError(AdapterError):
    """The adapter uses features that are not implemented; all of them are named."""

    def __init__(self, path: str, problems: Iterable[str]) -> None:
        self.path = path
        self.problems = list(problems)
        super().__init__(f"adapter {path} cannot be used: " + "; ".join(self.problems))


class AdapterShapeError(AdapterError):
    """A tensor's shape does not fit the base model."""

    def __init__(
        self, path: str, tensor: str, got: tuple[int, ...], allowed: tuple[int, ...]
    ) -> None:
        self.path = path
        self.tensor = tensor
        self.got = got
        self.allowed = allowed
        super().__init__(
            f"adapter {path} was made for another base model: tensor {tensor} has shape "
            f"{list(got)}, this model needs {list(allowed)}"
        )


class NonFiniteAdapterError(AdapterError):
    """A tensor holds NaN or Inf."""

    def __init__(self, path: str, tensors: Iterable[str]) -> None:
        self.path = path
        self.tensors = list(tensors)
        super().__init__(
            f"adapter {path} holds NaN or Inf in {', '.join(self.tensors)}; "
            "only finite values are allowed"
        )


class AdapterExistsError(AdapterError):
    """The name is taken by an adapter with other weights."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"adapter name {name!r} is taken by other weights; use replace_adapter, "
            "or remove_adapter first"
        )


class ModelError(PrecacheError):
    """The base model cannot be used."""


class UnsupportedModelError(ModelError):
    """The architecture or one of its settings is not supported."""


class PolicyError(PrecacheError):
    """The sharing policy cannot be used."""


class UnknownPolicyError(PolicyError):
    """No policy or schedule of that name."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind = kind
        self.name = name
        self.known = list(known)
        super().__init__(f"unknown {kind}: got {name!r}, allowed are {self.known}")


class PolicyNotAllowedError(PolicyError):
    """The adapters or the model do not allow the policy."""

    def __init__(self, policy: str, reason: str) -> None:
        self.policy = policy
        self.reason = reason
        super().__init__(f"policy {policy!r} is not allowed here: {reason}")


class ConfigError(PrecacheError):
    """A setting is wrong."""

    def __init__(self, field: str, got: object, allowed: str) -> None:
        self.field = field
        self.got = got
        self.allowed = allowed
        super().__init__(f"{field}: got {got!r}, allowed is {allowed}")


class CacheError(PrecacheError):
    """Something is wrong with a cache."""


class CacheBudgetError(CacheError):
    """A request needs more cache memory than the budget can ever give it."""

    def __init__(self, needed: int, budget: int, held: int = 0) -> None:
        self.needed = needed
        self.budget = budget
        self.held = held
        super().__init__(
            f"cache memory: the request needs {needed} bytes, the budget is {budget} bytes"
            + (f" of which {held} are held by running requests" if held else "")
        )


class CacheFileError(CacheError):
    """A saved cache is corrupt, or belongs to another model or other adapters."""


class UnknownSessionError(CacheError):
    """No session of that id is cached."""

    def __init__(self, session_id: str, known: Iterable[str]) -> None:
        self.session_id = session_id
        self.known = sorted(known)
        super().__init__(f"unknown session: got {session_id!r}, cached are {self.known}")


class NonFiniteLogitsError(PrecacheError):
    """The model produced NaN or Inf; this turn ended and cached nothing of it."""

    def __init__(self, adapter_name: str, position: int) -> None:
        self.adapter_name = adapter_name
        self.position = position
        super().__init__(
            f"adapter {adapter_name!r} produced non-finite logits at position {position}; "
            "the turn was ended and nothing of it was kept"
        )


class TurnCancelledError(PrecacheError):
    """The turn was cancelled between two forward passes; what it had cached stays."""

    def __init__(self) -> None:
        super().__init__("the turn was cancelled")


class EngineClosedError(PrecacheError):
    """The engine was closed."""

    def __init__(self) -> None:
        super().__init__("the engine is closed")
