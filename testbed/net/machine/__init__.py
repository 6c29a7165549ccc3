"""What this machine can do for a lab, and what to do about what it cannot.

capabilities.py  tries everything that a lab needs; remedies.py says, by platform, what mends what is missing
timekeeping.py   measures how late sleeps end and how busy the processors are
rootless.py      moves this process into a user namespace, where a lab needs no root
"""
