"""Several processes share one model; each holds a part of every large weight.

ranks     the processes, and their sums
shards    the part of the model that one rank holds
"""
