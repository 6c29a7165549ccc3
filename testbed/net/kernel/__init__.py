"""How the lab asks the Linux kernel for something, and reads back what it holds.

namespace.py    makes network namespaces that end with this process, and enters them
netlink.py      configures one namespace: devices, addresses, routes, neighbours, qdiscs
rtnetlink.py    has the bytes of those requests and answers; messages.py what all netlink messages share
netem_plan.py   plans what sch_netem is asked for; netem.py asks it, reads back and compares
sysctl.py       sets a namespace's parameters; offloads.py switches a device's offloads off
sock_diag.py    lists TCP connections with what the kernel knows of them
"""
