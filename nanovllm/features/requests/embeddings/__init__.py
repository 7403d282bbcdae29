"""Embeddings: the hidden state of a prompt's last token."""
