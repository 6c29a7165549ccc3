"""Codecs that send some of the values and say where they stand."""
