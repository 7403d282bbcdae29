"""The data plane: executes plans on a device and never sees a Sequence."""
