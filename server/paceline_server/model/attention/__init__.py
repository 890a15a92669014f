"""Attention over the paged KV cache: one interface, several back ends.

`interface` says what a back end does, `reference` does it in plain torch, and `hook` joins either to the attention
modules of a transformers model.
"""
