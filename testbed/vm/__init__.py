"""A guest kernel with sch_netem: how can a machine whose own kernel lacks it still run netem?

It is user-mode Linux, a Linux kernel that runs as an ordinary process: no root, no KVM, the processor's own
instructions.

kernel     what a fetched guest kernel consists of
debian     fetch one from Debian's packages
guest      boot it around one command
launch     the process that becomes the guest kernel
init       the first process inside
modprobe   load kernel modules inside

init and modprobe run where no installed package can be seen, so everything in this folder needs the standard library
only.
"""

from testbed.vm.debian import fetch_kernel
from testbed.vm.guest import Guest, run_in_guest, start_guest
from testbed.vm.kernel import GuestKernel, find_kernel

__all__ = ["Guest", "GuestKernel", "fetch_kernel", "find_kernel", "run_in_guest", "start_guest"]
