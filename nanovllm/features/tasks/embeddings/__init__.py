"""Embeddings: the hidden state of a prompt's last token.

pooling                the task
sentence_transformers  the settings of a checkpoint
"""
