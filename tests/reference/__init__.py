"""Independent definition reference: tiny models, real adapter folders, slow and obvious policies.

Nothing in this package imports `precache`: the engine is tested against it and shares no code
with it.
"""
