"""Measures access links from outside: a program with sockets at both ends of a link and one clock.

Each link has its own process; all measure concurrently, but at most one per CPU transfers bulk at a time.

job.py       the order to the program: what to measure on a link
readings.py its results: plain numbers, judged by the certificate
__main__.py the program: a process per link, taking turns
session.py   the measurements of one link, ordered so that none disturbs the next
echo.py      ICMP echoes: round trip and MTU
stream.py    TCP: messages after idle, and bulk
datagrams.py UDP trains, sent and received; patterns.py plans them and analyses arrivals
sockets.py   sockets inside namespaces, their buffers and the kernel's time stamps
"""
