"""KV blocks in host memory: evicted blocks are saved there and loaded again.

host_blocks  the block manager, which decides which block is where
pool         the memory, and the copies between it and the KV cache
"""
