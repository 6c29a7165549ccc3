"""Codecs that change the model at a boundary."""
