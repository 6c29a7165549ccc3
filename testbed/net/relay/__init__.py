"""How user space emulates links: one process reads every TUN device of a lab and hands packets on when they are due.

client.py    starts that process and talks to it (the only module that the rest of `net` needs, with tun.py)
tun.py       makes the devices

Inside the process, which imports little so that it starts fast and is small when locked into memory:
__main__.py  becomes real-time and runs the loop
control.py   answers the client's requests between two packets
engine.py    is the loop: read, through the pipes, write
queues.py    holds packets until they are due, and decides when to wake
pipe.py      has the formula: when does a packet leave, or is it dropped?
shaper.py    has all of it, made of wire.py (rates and traces), loss.py and draws.py (random numbers by counting)
"""
