"""Sends the lab's requests to the Linux kernel, and reads back the result.

namespace.py    creates network namespaces that end with this process, and enters them
netlink.py      configures one namespace: devices, addresses, routes, neighbours, qdiscs
rtnetlink.py    encodes those requests and decodes responses; messages.py has the format of all netlink messages, and
                packing.py the classes of pyroute2 that pack them
netem_plan.py   plans the parameters of sch_netem; netem.py sets them, reads back and compares
queue_plan.py   plans a rate and a queue behind netem, where a link needs them; shaping.py applies either, and counts
sysctl.py       sets a namespace's parameters; offloads.py switches a device's offloads off
sock_diag.py    lists TCP connections with the kernel's data on them
"""
