"""Models with linear attention, whose layers keep a state for each sequence: Qwen3.5.

hybrid_config  the fields of config.json, and the tensors
qwen3_5        the model
delta_rule     linear attention in plain torch
states         the states on the device, and how many there are
state_blocks   the block manager, which keeps snapshots of states for the prefix cache
"""
