"""The model: where it is found, how it is loaded, and how one step runs over it. The home of torch.

`store` and `hub` are free of torch, so that tools may look a model up without paying for its import.
"""
