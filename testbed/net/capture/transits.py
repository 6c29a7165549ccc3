"""Analyse the transit of packets in a capture by matching both ends of a link. Offline, with scapy."""

from __future__ import annotations

from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

from scapy.utils import RawPcapNgReader

from testbed.net.capture.pcapng import LINKTYPE_ETHERNET

_ETHERNET_BYTES = 14
_TTL_AND_CHECKSUM = ((8, 9), (10, 12))  # of the IPv4 header: a router rewrites them


class Transit(NamedTuple):
    """The packets of one direction of one link."""

    name: str
    """`node-0 up`"""
    sent: int
    """Packets captured at the sending end."""
    arrived: int
    """Those also captured at the receiving end, without copies."""
    transit_ms: tuple[float, float, float]
    """1st, 50th and 99th percentile of the time from end to end."""


def _key(content: bytes) -> bytes | None:
    """Return the bytes that identify a packet at both ends; None: not IPv4."""
    if len(content) < 20 or content[0] >> 4 != 4:
        return None
    masked = bytearray(content)
    for begin, end in _TTL_AND_CHECKSUM:
        masked[begin:end] = bytes(end - begin)
    return bytes(masked)


def _read_packets(path: Path) -> dict[str, dict[bytes, int]]:
    """Return the first capture time of every IPv4 packet, by interface name."""
    seen: dict[str, dict[bytes, int]] = {}
    with RawPcapNgReader(str(path)) as reader:
        for content, about in reader:
            name = about.ifname.decode() if isinstance(about.ifname, bytes) else about.ifname
            skip = _ETHERNET_BYTES if about.linktype == LINKTYPE_ETHERNET else 0
            at_ns = round(((about.tshigh << 32) + about.tslow) * 1e9 / about.tsresol)
            if (key := _key(content[skip:])) is not None:
                seen.setdefault(name, {}).setdefault(key, at_ns)
    return seen


def transits(path: Path) -> list[Transit]:
    """Match the packets of every link with both ends in the file: `up` from the near end to the far end, then `down`.

    If links share a far end, a packet belongs to the link at whose near end it was captured.
    """
    seen = _read_packets(path)
    far_names = [name for name in seen if " far " in name]
    links = []
    for near in (name for name in seen if " near " in name):
        link = near.split(" near ")[0]
        far = next((name for name in far_names if name.startswith(f"{link} ")), far_names[0] if far_names else None)
        if far is None:
            continue
        at_near, at_far = seen[near], seen[far]
        both = at_near.keys() & at_far.keys()
        gone_up = {key for key in at_near if key not in at_far or at_near[key] <= at_far[key]}
        up = [at_far[key] - at_near[key] for key in both if key in gone_up]
        down = [at_near[key] - at_far[key] for key in both if key not in gone_up]
        links.append(_transit(f"{link} up", len(gone_up), up))
        if len(far_names) == len(seen) - len(far_names):  # packets from a shared end may have used another link
            links.append(_transit(f"{link} down", len(at_far) - len(up), down))
    return links


def _transit(name: str, sent: int, transit_ns: list[int]) -> Transit:
    if len(transit_ns) < 2:
        return Transit(name, sent, len(transit_ns), (float("nan"),) * 3)
    cut = quantiles(transit_ns, n=100, method="inclusive")
    return Transit(name, sent, len(transit_ns), (cut[0] / 1e6, cut[49] / 1e6, cut[98] / 1e6))
