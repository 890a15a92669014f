"""The model: where it is found, how it is loaded, and how one step runs over it. The home of torch.

What the CPU kernels need is free of torch, down from `startup`, and so are `store` and `hub`: its import takes seconds
and hundreds of MiB. It comes with `transformers_backend`, `encoder_startup` and what these import.
"""
