"""A model of the control plane that catches one wrong slot, and mutants that it must catch."""
