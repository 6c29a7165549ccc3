"""Namespaces, links, shapers and their measurement: the only code that needs privilege. Knows no torch and no training."""
