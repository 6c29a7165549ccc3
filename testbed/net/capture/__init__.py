"""Captures packets at the ends of links into a file for Wireshark, and matches them afterwards.

capture.py starts and ends a capture
__main__.py the capturing program: a separate process, so that it does not slow the probe
ring.py     the packets of one device, from the kernel
pcapng.py   the format of the file
transits.py matches packets from end to end, offline; the only user of scapy
"""
