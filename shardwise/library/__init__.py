"""The Python library: what `import shardwise` offers, and what the commands are clients of."""
