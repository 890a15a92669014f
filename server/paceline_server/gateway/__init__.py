"""The gateway: everything between a client's socket and the engine's token ids.

It runs in a process of its own, so that JSON, templates, tokenising and SSE never hold up the engine's step loop. It
imports neither torch nor transformers.
"""
