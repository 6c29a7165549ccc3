"""This machine's capabilities for a lab, and remedies for missing ones.

capabilities.py tries everything that a lab needs; remedies.py has the fix for each missing capability, by platform
timekeeping.py   measures the lateness of sleeps and the load of the processors
rootless.py      moves this process into a user namespace, for labs without root
"""
