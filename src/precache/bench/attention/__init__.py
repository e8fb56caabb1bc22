"""`bench attention`: what `lora_attention` reaches, next to torch's attention and to what this machine can do.

Needs nothing but torch: no model, no adapter folder.
"""
