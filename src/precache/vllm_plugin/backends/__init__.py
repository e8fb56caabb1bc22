"""Attention over a paged cache with strips, one module a platform.

A backend is a vLLM attention implementation behind `layer.StripLayer`, which knows the layer's projection (slots, A and
B, the new rows' strips), the running step, and how strips are stored and moved. What a backend adds is attention with
`V_j = v_base + z_j B_j` for rows of slot j and with `v_base` for rows without an adapter.
"""
