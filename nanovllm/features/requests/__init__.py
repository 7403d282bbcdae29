"""Kinds of requests besides sampling, and options of sampling: grammars and logit rules."""
