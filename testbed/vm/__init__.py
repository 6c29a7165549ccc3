"""A guest kernel with sch_netem: how can a machine whose own kernel lacks it still run netem?

It is user-mode Linux, a Linux kernel that runs as an ordinary process: no root, no KVM, the processor's own
instructions.

kernel     what a guest kernel consists of
debian     packages of Debian
build      build one, which also has a virtual clock, from Debian's kernel source and time-travel.config
step       the process that becomes a step of the build
exchange   carry a built one to another machine, as one file
guest      boot it around one command
plan       what it is told to do inside, and how that gets there
launch     the process that becomes the guest kernel
init       the first process inside

init and plan run where no installed package can be seen, so everything in this folder needs the standard
library only.
"""

from testbed.vm.build import build_kernel, find_clock_kernel, virtual_clock
from testbed.vm.exchange import export_kernel, import_kernel
from testbed.vm.guest import Guest, start_guest, try_kernel
from testbed.vm.kernel import GuestKernel

__all__ = [
    "Guest",
    "GuestKernel",
    "build_kernel",
    "export_kernel",
    "find_clock_kernel",
    "import_kernel",
    "start_guest",
    "try_kernel",
    "virtual_clock",
]
