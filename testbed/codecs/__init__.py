"""Codecs turn a boundary's tensor into bytes and back. They know no sockets and no schedule.

`base` is the contract, `table` the list (no torch), `make` builds one; README.md shows how to add one.
"""
