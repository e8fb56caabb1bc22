"""Attention over a paged cache with strips, one module a platform.

A backend is a vLLM attention implementation that also has

    projection   the layer's StripProjection, which knows slots, A and B and holds the new rows' strips
    step         the StripStep of the running step
    use_strips_of(projection)

and that, when vLLM stores new keys and values, stores the rows' strips with `strips.write_strips`, applies the moves,
and attends with `V_j = v_base + z_j B_j` for rows of slot j and with `v_base` for rows without an adapter.
"""
