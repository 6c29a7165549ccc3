"""Codecs that remember earlier messages: differences and error feedback."""
