"""KV blocks in host memory: evicted blocks are saved there and loaded again."""
