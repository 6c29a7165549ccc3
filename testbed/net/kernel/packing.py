"""pyroute2's message classes, without the package around them, whose sockets and databases are not used here.

Importing those takes a third of a second of a processor in every program that builds a lab, and in every guest.
"""

from __future__ import annotations

import importlib.util
import sys

_WHOLE = sys.modules.get("pyroute2")
_spec = importlib.util.find_spec("pyroute2")
assert _spec is not None
sys.modules["pyroute2"] = _WHOLE or importlib.util.module_from_spec(_spec)  # its folder, where submodules are found
from pyroute2.netlink import nlmsg as nlmsg  # noqa: E402
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg as ifaddrmsg  # noqa: E402
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg as ifinfmsg  # noqa: E402
from pyroute2.netlink.rtnl.ndmsg import ndmsg as ndmsg  # noqa: E402
from pyroute2.netlink.rtnl.rtmsg import rtmsg as rtmsg  # noqa: E402
from pyroute2.netlink.rtnl.tcmsg import tcmsg as tcmsg  # noqa: E402

if _WHOLE is None:  # whoever imports it gets all of it
    del sys.modules["pyroute2"]
