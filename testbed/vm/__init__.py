"""A guest kernel with sch_netem, for machines whose own kernel lacks it.

It is user-mode Linux, a Linux kernel that runs as an ordinary process: no root, no KVM, no emulation of
instructions.

kernel     the files of a guest kernel
kernel_file the bundled kernel (clock_kernel/); export and import of a built one as a single file
debian     packages of Debian
build      builds one from Debian's kernel source; verifies the bundled one against its source
step       the process that becomes a step of the build
guest      boots it to run one command
guest_plan its orders for inside the guest, and their transfer
launch     the process that becomes the guest kernel
init       the first process inside

init and guest_plan run without access to installed packages, so all modules of this folder use the standard library
only.
"""

from testbed.vm.build import build_kernel, verify_kernel, virtual_clock
from testbed.vm.guest import Guest, start_guest, try_kernel
from testbed.vm.kernel import GuestKernel
from testbed.vm.kernel_file import export_kernel, find_clock_kernel, import_kernel, is_bundled

__all__ = [
    "Guest",
    "GuestKernel",
    "build_kernel",
    "export_kernel",
    "find_clock_kernel",
    "import_kernel",
    "is_bundled",
    "start_guest",
    "try_kernel",
    "verify_kernel",
    "virtual_clock",
]
