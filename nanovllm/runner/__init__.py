"""The data plane: executes plans on a device, without access to a Sequence."""
