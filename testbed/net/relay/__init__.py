"""Emulates links in user space: one process reads every TUN device of a lab and forwards packets when they are due.

client.py    starts that process and communicates with it (with tun.py, the only interface to the rest of `net`)
tun.py       creates the devices

Inside the process, which imports little to start fast and to be small when locked in memory:
__main__.py  becomes real-time and runs the loop
control.py   handles the client's requests between packets
engine.py    runs the loop: read, pass through the pipes, write
queues.py    holds packets until they are due, and schedules wake-ups
pipe.py      computes a packet's departure or drop
shaper.py    implements all effects, with wire.py (rates and traces) and loss.py (draws by packet number)
"""
