"""Kinds of requests besides sampling: beams, embeddings, log-likelihoods, grammars, logit rules."""
