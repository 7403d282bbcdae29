"""Where the KV of evicted blocks goes.

host_cache     host memory, as swap space and as a second prefix cache
disk_cache     files, which another process can load
"""
