"""The model of a training step: seconds, bytes of memory and bytes on the wire of every candidate layout at
once. No torch."""
