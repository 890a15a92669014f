"""What the field claims for the techniques that this engine is made of, measured on this machine: `python -m`."""
