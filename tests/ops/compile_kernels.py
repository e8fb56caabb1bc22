"""Compiles the Triton kernels for a GPU that need not be here, and prints the shared memory that each one takes.

Run by `test_triton_compile.py` in a process of its own, without TRITON_INTERPRET. The interpreter accepts much that the
compiler refuses.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from precache.ops import BackendUnavailableError, KeyStrip, lora_attention
from precache.ops.triton.kernels import attend_kernel, merge_kernel
from precache.ops.triton.launch import Call, Launch, Pages, default_tiles, plan
from tests.ops.cases import Case

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32"}


def call(
    q_len: int,
    kv_len: int,
    *,
    heads: tuple[int, int, int] = (32, 8, 128),
    dtype: torch.dtype = torch.bfloat16,
    rank: int = 8,
    key_rank: int = 0,
    paged: bool = False,
    **options: Any,
) -> Call:
    """A call over memory that nobody fills."""
    num_heads, num_kv_heads, head_dim = heads

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def index(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32)

    if paged:
        k, z = empty(4, 16, num_kv_heads, head_dim), empty(4, 16, 3, rank)
    else:
        k, z = empty(1, num_kv_heads, kv_len, head_dim).transpose(1, 2), empty(1, kv_len, 1, rank)
    tables = (empty(kv_len, head_dim), empty(kv_len, head_dim))
    strip = KeyStrip(empty(kv_len, key_rank), empty(num_kv_heads, key_rank, head_dim), *tables)
    return Call(
        q=empty(q_len, num_heads, head_dim),
        k=k,
        v_base=k,
        z=z,
        b=empty(3, num_kv_heads, rank, head_dim),
        scale=0.1,
        max_q_len=q_len,
        max_kv_len=kv_len,
        first_position=kv_len - q_len,
        k_lora=strip if key_rank else None,
        pages=Pages(index(3, 9), index(4), index(3), index(3)) if paged else None,
        **options,
    )


CALLS = {
    "decode over pages": (call(1, 8192, paged=True), 8),
    "prefill, window, softcap, key strip": (
        call(512, 8192, heads=(9, 3, 64), key_rank=8, window=99, softcap=30.0),
        1,
    ),
}


def compiled(kernel: Any, launch: Launch, capability: int) -> int:
    """Bytes of shared memory of a kernel, compiled down to machine code."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{NAMES[value.dtype]}"
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {**launch.options, "enable_fp_fusion": True}
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert binary.asm["cubin"]
    return int(binary.metadata.shared)


def refusal() -> str:
    """What is said when the backend is asked for where it cannot run."""
    try:
        lora_attention(**Case().inputs()._asdict(), backend="triton")
    except BackendUnavailableError as error:
        return str(error)
    return "none"


def main() -> None:
    shared = {}
    for name, (made, splits) in CALLS.items():
        tiles = replace(default_tiles(made), num_splits=splits)
        attend, merge = plan(made, tiles, torch.empty_like(made.q), torch.empty(1))
        shared[name] = compiled(attend_kernel, attend, int(sys.argv[1]))
        if merge is not None:
            shared[f"{name}, merge"] = compiled(merge_kernel, merge, int(sys.argv[1]))
    print(json.dumps({"shared": shared, "refusal": refusal()}))


if __name__ == "__main__":
    main()
