"""A guest kernel that has sch_netem, for machines whose own kernel has not.

It is user-mode Linux, a Linux kernel that runs as an ordinary process: no root, no KVM, the processor's own instructions.
kernel.py knows what a fetched kernel consists of; debian.py fetches one from Debian's packages; guest.py boots it around one
command, through launch.py; init.py is the first process inside; modprobe.py loads modules inside. init.py and modprobe.py
run where no installed package can be seen, so everything in this folder needs the standard library only.
"""

from testbed.vm.debian import fetch
from testbed.vm.guest import run
from testbed.vm.kernel import GuestKernel, find

__all__ = ["GuestKernel", "fetch", "find", "run"]
