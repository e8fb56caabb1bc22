"""The sharing policies by their definition: section 3 of the design, one class a row of its table.

Owns: what each policy stores for a token and what a reader makes of it. A token's whole story is:
which pass gave its layer inputs X (`forward.Pass.inputs`), and what of X was kept.
Does not own: speed. Every turn is one call over all its tokens, every context is concatenated anew.

Vocabulary: k = RoPE(X W_k), v_base = X W_v, a strip z = X A_j (unscaled), for values and, where the
adapter has key LoRA, for keys. Agent None is the base model: a reader and writer with no adapter.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .forward import Network, Pass
from .lora import AdapterDict

STRIP_TARGETS = ("k_proj", "v_proj")

Strip = dict[tuple[int, str], Tensor]  # (layer, "k_proj" or "v_proj") -> z [strip_len, lora_rank]


class KeysValues(NamedTuple):
    """Keys and values of a context, per layer [num_kv_heads, context_len, head_dim]."""

    k: list[Tensor]
    v: list[Tensor]


class Caches(NamedTuple):
    """What is stored; a strip is None at a layer whose projection the adapter does not touch."""

    k: list[Tensor]  # per layer [num_kv_heads, context_len, head_dim], after RoPE
    v: list[Tensor]  # likewise: v_base under the split policies, full V under fullshared
    v_strips: dict[str, list[Tensor | None]]  # agent -> per layer [strip_len, lora_rank]
    k_strips: dict[str, list[Tensor | None]]


class ReferenceState:
    """One trajectory under one policy."""

    def __init__(
        self,
        model: PreTrainedModel,
        adapters: Mapping[str, AdapterDict],
        policy: str,
        **settings: Any,
    ) -> None:
        from .calibrated import Calibrated  # which are made of the classes here
        from .recompute import RECOMPUTE

        self.tokens: list[int] = []
        self.writers: list[str | None] = []  # who wrote each token
        self._policy = {**POLICIES, **RECOMPUTE, "calibrated": Calibrated}[policy](
            Network(model), **settings
        )
        for name, adapter in adapters.items():
            self.add_adapter(name, adapter)

    def turn(self, agent: str | None, new_tokens: Sequence[int]) -> Tensor:
        """Let `agent` process the tokens of its turn; return their logits [num_new, vocab_size]."""
        logits = self._policy.turn(agent, self.tokens, list(new_tokens))
        self.tokens = self.tokens + list(new_tokens)
        self.writers = self.writers + [agent] * len(new_tokens)
        return logits

    def catch_up(self, agent: str | None, length: int | None = None) -> None:
        """Only what a turn of `agent` over the first `length` tokens does before its own tokens."""
        self._policy.fill(agent, self.tokens[:length])

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on."""
        self.tokens = self.tokens[:length]
        self.writers = self.writers[:length]
        self._policy.truncate(length)

    def add_adapter(self, name: str, adapter: AdapterDict) -> None:
        """Register an adapter; under a known name, with other weights, replace it.

        A replaced adapter loses its strip. What its old weights wrote goes too, and so does all
        that follows, unless the policy's base is neutral.
        """
        known = self._policy.adapters.get(name)
        if known is not None and _same_weights(known, adapter):
            return
        touched = self._policy.first_touched(name, self.writers)
        if known is not None and touched is not None and not self._policy.base_is_neutral:
            self.truncate(touched)
        self._policy.set_adapter(name, adapter)

    def caches(self) -> Caches:
        """What is stored now (not for nonshared, which stores one cache per agent)."""
        return self._policy.caches()

    def seen_by(self, agent: str | None) -> KeysValues:
        """Full keys and values of all tokens as `agent` would read them in its next turn."""
        return self._policy.seen_by(agent, self.tokens)


class _Policy:
    """What the rows of the table have in common: a network and the adapters by name."""

    base_is_neutral = False  # True: nothing an adapter did is in k and v of the shared cache

    def __init__(self, network: Network) -> None:
        self.network = network
        self.adapters: dict[str, AdapterDict] = {}

    def adapter_of(self, agent: str | None) -> AdapterDict:
        return {} if agent is None else self.adapters[agent]

    def set_adapter(self, name: str, adapter: AdapterDict) -> None:
        self.adapters[name] = adapter

    def turn(self, agent: str | None, prefix: list[int], new_tokens: list[int]) -> Tensor:
        raise NotImplementedError

    def fill(self, agent: str | None, prefix: list[int]) -> None:
        """Bring what is cached of the prefix up to date for the agent."""

    def first_touched(self, name: str, writers: Sequence[str | None]) -> int | None:
        """The first token whose k and v depend on an agent's weights by its own passes."""
        return writers.index(name) if name in writers else None

    def truncate(self, length: int) -> None:
        raise NotImplementedError

    def caches(self) -> Caches:
        raise NotImplementedError

    def seen_by(self, agent: str | None, tokens: list[int]) -> KeysValues:
        raise NotImplementedError


class NonShared(_Policy):
    """The exact thing: every agent runs the whole sequence with its own adapter, nothing shared."""

    base_is_neutral = True  # there is no shared base that could hold another adapter's work

    def turn(self, agent: str | None, prefix: list[int], new_tokens: list[int]) -> Tensor:
        return self._run_all(agent, prefix + new_tokens).logits[len(prefix) :]

    def truncate(self, length: int) -> None:
        pass  # the tokens are the whole state

    def caches(self) -> Caches:
        raise NotImplementedError("nonshared keeps one cache per agent: use seen_by(agent)")

    def seen_by(self, agent: str | None, tokens: list[int]) -> KeysValues:
        adapter, inputs = self.adapter_of(agent), self._run_all(agent, tokens).inputs
        return KeysValues(
            [self.network.keys(layer, x, 0, adapter) for layer, x in enumerate(inputs)],
            [self.network.values(layer, x, adapter) for layer, x in enumerate(inputs)],
        )

    def _run_all(self, agent: str | None, tokens: list[int]) -> Pass:
        network, adapter = self.network, self.adapter_of(agent)

        def context(layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
            return network.keys(layer, x, 0, adapter), network.values(layer, x, adapter)

        return network.run(tokens, 0, adapter, context)


class FullShared(_Policy):
    """One cache of full keys and values, the writer's LoRA included; readers take it as it is."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.k = _empty_heads(network)
        self.v = _empty_heads(network)

    def turn(self, agent: str | None, prefix: list[int], new_tokens: list[int]) -> Tensor:
        network, adapter, start = self.network, self.adapter_of(agent), len(prefix)

        def context(layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
            k = torch.cat([self.k[layer], network.keys(layer, x, start, adapter)], dim=1)
            v = torch.cat([self.v[layer], network.values(layer, x, adapter)], dim=1)
            return k, v

        result = network.run(new_tokens, start, adapter, context)
        for layer, x in enumerate(result.inputs):
            self.k[layer], self.v[layer] = context(layer, x)
        return result.logits

    def truncate(self, length: int) -> None:
        self.k = [k[:, :length] for k in self.k]
        self.v = [v[:, :length] for v in self.v]

    def caches(self) -> Caches:
        return Caches(list(self.k), list(self.v), {}, {})

    def seen_by(self, agent: str | None, tokens: list[int]) -> KeysValues:
        return KeysValues(list(self.k), list(self.v))


class _Split(_Policy):
    """A shared base (k, v_base) and one strip per adapter; rows differ in `fill` and `write`.

    A strip is valid for a prefix of the tokens. One that is shorter than the base (an adapter added
    later) is not written by others' turns: its owner's next turn fills all that is missing.
    """

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.k = _empty_heads(network)
        self.v_base = _empty_heads(network)
        self.strips: dict[str, Strip] = {}
        self.strip_lens: dict[str, int] = {}

    # --- the three steps of a turn ---------------------------------------------------------------

    def turn(self, agent: str | None, prefix: list[int], new_tokens: list[int]) -> Tensor:
        self.fill(agent, prefix)
        adapted = self.adapted_pass(agent, new_tokens, len(prefix))
        self.write(agent, new_tokens, len(prefix), adapted)
        return adapted.logits

    def fill(self, agent: str | None, prefix: list[int]) -> None:
        """Compute the strip of the tokens for which it is missing: here by the agent's own pass.

        The hidden states are the agent's own; k and v_base are taken from the shared cache.
        """
        if agent is None or self.strip_lens[agent] >= len(prefix):
            return
        start = self.strip_lens[agent]
        adapter, strip = self.adapters[agent], self.strips[agent]

        def context(layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
            own_strip = _extended(strip, adapter, layer, x)
            return self.read(layer, self.k[layer], self.v_base[layer], adapter, own_strip)

        own = self.network.run(prefix[start:], start, adapter, context)
        self.append_strip(agent, own.inputs)

    def write(self, agent: str | None, new_tokens: list[int], start: int, adapted: Pass) -> None:
        """Store what this row of the table keeps of the turn's tokens."""
        raise NotImplementedError

    # --- reading ---------------------------------------------------------------------------------

    def adapted_pass(self, agent: str | None, new_tokens: list[int], start: int) -> Pass:
        """The turn with the agent's adapter, over the stored prefix as this agent reads it."""
        adapter = self.adapter_of(agent)
        strip = {} if agent is None else self.strips[agent]

        def context(layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
            k = torch.cat([self.k[layer], self.network.keys(layer, x, start, {})], dim=1)
            v_base = torch.cat([self.v_base[layer], self.network.values(layer, x, {})], dim=1)
            return self.read(layer, k, v_base, adapter, _extended(strip, adapter, layer, x))

        return self.network.run(new_tokens, start, adapter, context)

    def read(
        self, layer: int, k: Tensor, v_base: Tensor, adapter: AdapterDict, strip: Strip
    ) -> tuple[Tensor, Tensor]:
        """K_j = k + RoPE(s z_k B_k) and V_j = v_base + s z_v B_v, in full."""
        if (layer, "k_proj") in adapter:
            k = k + self.network.lora_keys(layer, strip[layer, "k_proj"], 0, adapter)
        if (layer, "v_proj") in adapter:
            v_base = v_base + self.network.lora_values(layer, strip[layer, "v_proj"], adapter)
        return k, v_base

    def seen_by(self, agent: str | None, tokens: list[int]) -> KeysValues:
        if agent is not None and self.strip_lens[agent] < len(tokens):
            raise ValueError(f"the strip of {agent!r} is not filled yet")
        adapter = self.adapter_of(agent)
        strip = {} if agent is None else self.strips[agent]
        layers = [
            self.read(layer, self.k[layer], self.v_base[layer], adapter, strip)
            for layer in range(self.network.num_layers)
        ]
        return KeysValues([k for k, _ in layers], [v for _, v in layers])

    # --- writing ---------------------------------------------------------------------------------

    def append_base(self, inputs: list[Tensor], start: int) -> None:
        for layer, x in enumerate(inputs):
            k, v_base = self.network.keys(layer, x, start, {}), self.network.values(layer, x, {})
            self.k[layer] = torch.cat([self.k[layer], k], dim=1)
            self.v_base[layer] = torch.cat([self.v_base[layer], v_base], dim=1)

    def append_strip(self, agent: str, inputs: list[Tensor]) -> None:
        for layer, x in enumerate(inputs):
            self.strips[agent].update(_extended(self.strips[agent], self.adapters[agent], layer, x))
        self.strip_lens[agent] += len(inputs[0])

    def append_strips(self, start: int, inputs_of: Callable[[str], list[Tensor]]) -> None:
        """Extend the strip of every adapter j that has none missing by inputs_of(j) A_j."""
        for name in self.adapters:
            if self.strip_lens[name] == start:
                self.append_strip(name, inputs_of(name))

    def truncate(self, length: int) -> None:
        self.k = [k[:, :length] for k in self.k]
        self.v_base = [v_base[:, :length] for v_base in self.v_base]
        for name, strip in self.strips.items():
            self.strips[name] = {key: z[:length] for key, z in strip.items()}
            self.strip_lens[name] = min(self.strip_lens[name], length)

    def set_adapter(self, name: str, adapter: AdapterDict) -> None:
        super().set_adapter(name, adapter)
        self.strips[name] = _empty_strip(adapter)
        self.strip_lens[name] = 0

    def caches(self) -> Caches:
        return Caches(
            list(self.k), list(self.v_base), self._strips_of("v_proj"), self._strips_of("k_proj")
        )

    def _strips_of(self, target: str) -> dict[str, list[Tensor | None]]:
        layers = range(self.network.num_layers)
        return {
            name: [strip.get((layer, target)) for layer in layers]
            for name, strip in self.strips.items()
        }


class BaseShared(_Split):
    """Base from the writer's adapted pass; every strip from its own agent's pass over the token."""

    def write(self, agent: str | None, new_tokens: list[int], start: int, adapted: Pass) -> None:
        self.append_base(adapted.inputs, start)
        if agent is not None:
            self.append_strip(agent, adapted.inputs)


class PreLRShared(_Split):
    """Base and the strips of all adapters from the writer's adapted pass: X_writer A_j."""

    def write(self, agent: str | None, new_tokens: list[int], start: int, adapted: Pass) -> None:
        self.append_base(adapted.inputs, start)
        self.append_strips(start, lambda _name: adapted.inputs)

    def set_adapter(self, name: str, adapter: AdapterDict) -> None:
        """Adapters whose A are bitwise equal share one strip, so a later one misses nothing."""
        super().set_adapter(name, adapter)
        for other, other_adapter in self.adapters.items():
            if other != name and first_different_a(adapter, other_adapter) is None:
                self.strips[name] = dict(self.strips[other])
                self.strip_lens[name] = self.strip_lens[other]
                return


class BaseLRShared(PreLRShared):
    """PreLRShared with one strip for all: every A that feeds the cache must be the common one."""

    def set_adapter(self, name: str, adapter: AdapterDict) -> None:
        for other, other_adapter in self.adapters.items():
            different = first_different_a(adapter, other_adapter)
            if other != name and different is not None:
                layer, target = different
                raise ValueError(f"A of {target} differs between {name} and {other}: layer {layer}")
        super().set_adapter(name, adapter)


class ReBaseShared(_Split):
    """Base and strips from the neutral pass, but the writer's own strip from its adapted pass."""

    base_is_neutral = True

    def write(self, agent: str | None, new_tokens: list[int], start: int, adapted: Pass) -> None:
        neutral = self.adapted_pass(None, new_tokens, start)
        self.append_base(neutral.inputs, start)
        self.append_strips(start, lambda name: adapted.inputs if name == agent else neutral.inputs)

    def fill(self, agent: str | None, prefix: list[int]) -> None:
        """A missing strip is X_neutral A_j: the neutral pass over the whole prefix, once more."""
        if agent is None or self.strip_lens[agent] >= len(prefix):
            return
        start = self.strip_lens[agent]

        def context(layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.network.keys(layer, x, 0, {}), self.network.values(layer, x, {})

        neutral = self.network.run(prefix, 0, {}, context)
        self.append_strip(agent, [x[start:] for x in neutral.inputs])


POLICIES: dict[str, type[_Policy]] = {
    "nonshared": NonShared,
    "fullshared": FullShared,
    "baseshared": BaseShared,
    "baselrshared": BaseLRShared,
    "prelrshared": PreLRShared,
    "rebaseshared": ReBaseShared,
}


def first_different_a(one: AdapterDict, other: AdapterDict) -> tuple[int, str] | None:
    """Return the first (layer, target) whose cache-feeding A is not bitwise the same in both."""
    for key in sorted({*one, *other}):
        if key[1] not in STRIP_TARGETS:
            continue
        if key not in one or key not in other or not torch.equal(one[key].a, other[key].a):
            return key
    return None


def _same_weights(one: AdapterDict, other: AdapterDict) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[key].a, other[key].a)
        and torch.equal(one[key].b, other[key].b)
        and one[key].scaling == other[key].scaling
        for key in one
    )


def _extended(strip: Strip, adapter: AdapterDict, layer: int, x: Tensor) -> Strip:
    """The strips of one layer, old tokens and x A_j of the new ones."""
    return {
        (layer, target): torch.cat([strip[layer, target], x @ adapter[layer, target].a.T])
        for target in STRIP_TARGETS
        if (layer, target) in adapter
    }


def _empty_strip(adapter: AdapterDict) -> Strip:
    return {
        key: torch.empty(0, lora.a.shape[0])
        for key, lora in adapter.items()
        if key[1] in STRIP_TARGETS
    }


def _empty_heads(network: Network) -> list[Tensor]:
    shape = (network.config.num_key_value_heads, 0, network.head_dim)
    return [torch.empty(shape) for _ in range(network.num_layers)]
