"""The engine: a transformers model whose LoRA agents share one cache."""
