"""Embeddings: the hidden state of a prompt's last token.

pooling                the parameters, the task, and the result
sentence_transformers  the settings of a checkpoint
"""
