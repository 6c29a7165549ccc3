"""How does a link behave, seen from outside? A program measures access links with sockets at both ends and one clock.

One process per link measures at the same time as the others, but no more of them move bulk at a time than there are
CPUs.

job.py       what to measure on a link, as the program is told it
readings.py  what it found: plain numbers, which the certificate judges
__main__.py  the program: a process per link, and their turns
session.py   the measurements of one link, in an order in which none disturbs the next
echo.py      ICMP echoes: round trip and MTU
stream.py    TCP: messages after idle, and bulk
datagrams.py UDP trains, offered and received; patterns.py decides what is offered and counts what arrived
sockets.py   sockets inside namespaces, their buffers and the kernel's time stamps
"""
