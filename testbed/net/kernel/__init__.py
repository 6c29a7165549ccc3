"""What the kernel does for a link: namespaces, netlink, qdiscs, sysctls, offloads, socket diagnosis."""
