"""Make network links that are what a profile says, and prove it: the only code that needs privilege.

It knows no torch and no training.

From a profile to the kernel one reads lab.py -> topology.py -> build.py -> kernel/netlink.py:
lab.py        owns what stands: builds it, plays and changes links, certifies them, takes everything down
topology.py   plans a star or a line: which namespaces, links and addresses there are
plan.py       is what a plan is made of
build.py      makes what a plan says, reads it back and compares

meters.py     counts what every link carries, under either engine; sampler.py writes that down ten times a second
directory.py  lists the labs that run on this machine, for `testbed shell`
schedules.py  changes netem while a link varies
kernel/       speaks to the kernel: namespaces, netlink, netem, sysctls
relay/        emulates links in user space, where the kernel has no netem
probe/        sends packets over links and notes what arrives; certificate/ plans that and judges it
capture/      keeps packets for Wireshark
machine/      says what this machine can do
"""
