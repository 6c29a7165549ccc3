"""Packets at the ends of links, written to a file and matched afterwards."""
