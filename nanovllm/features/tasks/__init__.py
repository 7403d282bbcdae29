"""Kinds of requests that do not sample one token after another.

beam_search    beam search, whose beams share blocks
embeddings     the hidden states of a prompt
loglikelihood  the log-probability of a continuation
rerank         scores of pairs of texts
results        what the calls return
"""
