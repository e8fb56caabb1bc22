"""What the parts of a decode step take, and what fusing or compiling them would save.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/decode_parts.py --json

One row goes through the layers of a Llama in float32, part by part, without attention and the Python around it; LoRA of
rank 8 on q and v, strips of --agents agents. All parts are timed one after the other in each repeat. `bytes` are the
weights that a part reads, `floor_ms` what reading them takes at the rate of a large copy.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from precache.bench.adapters import LORA_RANK
from precache.bench.attention.ceilings import measure_ceilings
from precache.bench.attention.timing import seconds_per_call
from precache.bench.environment import environment
from precache.bench.spread import Spread, spread_of
from precache.engine.checkpoints import resolve_model
from precache.engine.model import store_wide_weights_by_column

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Part:
    """Something that runs once a step, in every layer."""

    name: str
    call: Callable[[], object]
    num_bytes: int = 0


@dataclass(frozen=True)
class Figure:
    """Milliseconds of a step."""

    name: str
    wall_ms: Spread
    cpu_ms: Spread
    bytes: int
    floor_ms: float


@torch.inference_mode()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2", help="a Llama: folder, hub id or smollm2")
    parser.add_argument("--agents", type=int, default=3, help="whose strips are written")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument(
        "--compile",
        action="store_true",
        help="also with torch.compile: half a minute, and a compiler",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(
        resolve_model(args.model), dtype=torch.float32, use_safetensors=True
    ).eval()
    store_wide_weights_by_column(model)
    copied_per_s = measure_ceilings(torch.float32, CPU).bytes_per_s
    parts = list(parts_of(model, args.agents, args.compile))
    figures = [figure(part, times, copied_per_s) for part, times in measured(parts, args.repeats)]
    if args.json:
        found = {
            **environment(),
            "copy_bytes_per_s": copied_per_s,
            "parts": [asdict(item) for item in figures],
        }
        print(json.dumps({**found, "repeats": args.repeats, "agents": args.agents}))
        return
    print("| part | wall ms | CPU ms | MB read | ms by a copy's rate |\n|---|---|---|---|---|")
    for item in figures:
        print(
            f"| {item.name} | {shown(item.wall_ms)} | {shown(item.cpu_ms)} | {item.bytes / 1e6:.0f} "
            f"| {item.floor_ms:.1f} |"
        )


def shown(spread: Spread) -> str:
    return f"{spread.median:.1f} ({spread.low:.1f}-{spread.high:.1f})"


def measured(parts: list[Part], repeats: int) -> Iterator[tuple[Part, list[tuple[float, float]]]]:
    """Wall and CPU milliseconds of every part in every repeat."""
    times: dict[str, list[tuple[float, float]]] = {part.name: [] for part in parts}
    for part in parts:
        part.call()
    for _ in range(repeats):
        for part in parts:
            took = seconds_per_call(part.call, 1, CPU)
            times[part.name].append((took.wall_s * 1e3, took.cpu_s * 1e3))
    for part in parts:
        yield part, times[part.name]


def figure(part: Part, times: list[tuple[float, float]], copied_per_s: float) -> Figure:
    wall, cpu = zip(*times, strict=True)
    return Figure(
        part.name,
        spread_of(wall),
        spread_of(cpu),
        part.num_bytes,
        part.num_bytes / copied_per_s * 1e3,
    )


def parts_of(model: nn.Module, agents: int, compiled: bool) -> Iterator[Part]:
    """The parts, and what they might be replaced by."""
    layers, config = list(model.model.layers), model.config
    x = torch.randn(1, 1, config.hidden_size)
    yield from projections(layers, x, agents)
    yield Part(
        "norms, as transformers writes them",
        each(layers, lambda layer: (layer.input_layernorm(x), layer.post_attention_layernorm(x))),
    )
    yield Part(
        "norms, one operator each",
        each(
            layers,
            lambda layer: (
                fused_norm(layer.input_layernorm, x),
                fused_norm(layer.post_attention_layernorm, x),
            ),
        ),
    )
    head_dim = config.hidden_size // config.num_attention_heads
    q, k = (
        torch.randn(1, n, 1, head_dim)
        for n in (config.num_attention_heads, config.num_key_value_heads)
    )
    cos = torch.randn(1, 1, head_dim)
    yield Part("rotary positions", each(layers, lambda _: apply_rotary_pos_emb(q, k, cos, cos)))
    tail_bytes = sum(size(layer.mlp) + size(layer.self_attn.o_proj) for layer in layers)
    yield Part("o, norm and MLP", each(layers, lambda layer: tail(layer, x, x)), tail_bytes)
    if compiled:
        fused = torch.compile(tail, dynamic=False)
        torch._dynamo.config.cache_size_limit = len(layers) + 1
        yield Part(
            "o, norm and MLP, compiled", each(layers, lambda layer: fused(layer, x, x)), tail_bytes
        )
    yield Part("head", lambda: model.lm_head(x), size(model.lm_head))


def projections(layers: list[nn.Module], x: Tensor, agents: int) -> Iterator[Part]:
    """q, k, v, their LoRA and the strips: in six products, and in two with all weights in one matrix."""
    hidden = x.shape[-1]
    own_a, own_b = (
        torch.randn(LORA_RANK, hidden),
        torch.randn(layers[0].self_attn.q_proj.out_features, LORA_RANK),
    )
    strips_a = torch.randn(agents * LORA_RANK, hidden)
    num_bytes = sum(
        size(getattr(layer.self_attn, name))
        for layer in layers
        for name in ("q_proj", "k_proj", "v_proj")
    )

    def separate(layer: nn.Module) -> None:
        attention = layer.self_attn
        attention.q_proj(x)[0].addmm_(torch.mm(x[0], own_a.t()), own_b.t())
        attention.k_proj(x), attention.v_proj(x), torch.mm(x[0], strips_a.t())

    def joined(layer: nn.Module) -> Tensor:
        attention = layer.self_attn
        weights = (
            attention.q_proj.weight,
            attention.k_proj.weight,
            attention.v_proj.weight,
            own_a,
            strips_a,
        )
        return torch.cat(weights).t().contiguous().t()

    together = {layer: joined(layer) for layer in layers}
    low_rank = slice(-len(strips_a) - LORA_RANK, -len(strips_a))

    def fused(layer: nn.Module) -> None:
        y = functional.linear(x, together[layer])[0]
        y[:, : len(own_b)].addmm_(y[:, low_rank], own_b.t())

    yield Part("q, k, v, LoRA and strips", each(layers, separate), num_bytes)
    yield Part("q, k, v, LoRA and strips, fused", each(layers, fused), num_bytes)


def each(layers: list[nn.Module], call: Callable[[nn.Module], object]) -> Callable[[], object]:
    return lambda: [call(layer) for layer in layers]


def fused_norm(norm: nn.Module, x: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


def tail(layer: nn.Module, hidden_states: Tensor, attended: Tensor) -> Tensor:
    """What follows the attention in a layer."""
    hidden_states = hidden_states + layer.self_attn.o_proj(attended)
    return hidden_states + layer.mlp(layer.post_attention_layernorm(hidden_states))


def size(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


if __name__ == "__main__":
    main()
