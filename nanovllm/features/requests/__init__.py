"""Kinds of requests, and what requests can ask of the sampler: grammars and logit rules."""
