"""What passed over a link? Packets at the ends of links, kept in a file that Wireshark opens and matched afterwards.

capture.py  start a capture and end it
__main__.py the program that captures: a process of its own, so that it takes no time from the probe
ring.py     the packets of one device, from the kernel
pcapng.py   the format of the file
transits.py match packets from end to end, offline; the only user of scapy
"""
