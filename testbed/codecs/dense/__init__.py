"""Codecs that send every value, with fewer bits."""
