"""Builds network links that match a profile, and proves it: the only code that needs privilege.

Independent of torch and training.

The path from a profile to the kernel is lab.py -> topology.py -> build.py -> kernel/netlink.py:
lab.py        owns a running lab: builds it, plays and changes links, certifies them, tears everything down
topology.py   plans the namespaces, links and addresses of a star or a line
lab_plan.py   has the records of a plan
build.py      builds a plan, reads it back and compares

meters.py     counts the traffic of every link, under either engine; sampler.py records it ten times a second
directory.py  lists the labs that run on this machine, for `testbed shell`
schedules.py changes netem for varying links
background.py sends what other machines behind the same links send
kernel/       kernel interfaces: namespaces, netlink, netem, sysctls
relay/        emulates links in user space, for kernels without netem
probe/        sends packets over links and records arrivals; certificate/ plans and judges that
capture/      captures packets for Wireshark
machine/      detects this machine's capabilities
"""
