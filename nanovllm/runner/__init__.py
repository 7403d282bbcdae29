"""The data plane: tensors, never a Sequence."""
