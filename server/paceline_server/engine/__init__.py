"""The engine: scheduler, block manager, step loop, and the wire between the gateway's process and the engine's."""
