"""Several processes share one model; each holds a part of every large weight."""
