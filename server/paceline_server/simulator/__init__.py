"""The simulator: the engine's own scheduler, driven by a model of the machine and a virtual clock instead of torch."""
