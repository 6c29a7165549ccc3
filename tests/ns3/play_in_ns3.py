"""Plays jobs in the simulator ns-3, under a Python with the package ns3: `PYTHON tests/ns3/play_in_ns3.py < JOBS`.

Each line of standard input describes a job in JSON, as `describe.describe` does; each line of standard output has its
result. It imports nothing of testbed, so that the simulator can have an environment of its own.

Each direction of a link is a SimpleNetDevice: a drop-tail queue of packets, a rate that counts IP packets, and a delay.
In a star every node has a link to a hub, in a line to its neighbours. Every lane is a Python program; messages are TCP.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict, deque
from typing import Any

from ns import ns

_BEGIN_NS = 1_000_000_000
"""Connections are made before this, and the job begins at it."""
_BUFFER_BYTES = 1 << 29
"""Of a socket: nothing waits for room in it, and the window is never the limit."""
_PORT = 20000

ns.cppyy.cppdef("""
#include <map>
namespace testbed {
using namespace ns3;
void (*due)(int);
void (*came)(int, int);
std::map<int, Ptr<Socket>> sockets;  // by end
int64_t timeouts = 0, recoveries = 0, dropped = 0;

void Congestion(TcpSocketState::TcpCongState_t before, TcpSocketState::TcpCongState_t now) {
  timeouts += now == TcpSocketState::CA_LOSS;
  recoveries += now == TcpSocketState::CA_RECOVERY;
}
void At(int64_t ns, int what) { Simulator::Schedule(NanoSeconds(ns), [what] { due(what); }); }
void Read(int end, Ptr<Socket> socket) {
  int bytes = 0;
  while (Ptr<Packet> packet = socket->Recv()) bytes += packet->GetSize();
  if (bytes) came(end, bytes);
}
void Watch(int end, Ptr<Socket> socket) {
  sockets[end] = socket;
  socket->SetRecvCallback(Callback<void, Ptr<Socket>>([end](Ptr<Socket> ready) { Read(end, ready); }));
  socket->TraceConnectWithoutContext("CongState", MakeCallback(&Congestion));
}
void Accept(int end, Ptr<Socket> listener) {
  listener->SetAcceptCallback(MakeNullCallback<bool, Ptr<Socket>, const Address&>(),
    Callback<void, Ptr<Socket>, const Address&>([end](Ptr<Socket> socket, const Address&) {
      Watch(end, socket);
    }));
}
void Begin(int64_t ns, Ptr<RateErrorModel> errors) {  // connections are made without loss
  errors->Disable();
  Simulator::Schedule(NanoSeconds(ns), [errors] { errors->Enable(); });
}
void Drop(Ptr<const Packet>) { dropped++; }
void CountDrops(Ptr<Queue<Packet>> queue) { queue->TraceConnectWithoutContext("Drop", MakeCallback(&Drop)); }
int Send(int end, uint32_t bytes) { return sockets.at(end)->Send(Create<Packet>(bytes)); }
int64_t Now() { return Simulator::Now().GetNanoSeconds(); }
}
""")
_helpers = ns.cppyy.gbl.testbed


def _configure(tcp: dict[str, Any]) -> None:
    for name, value in {
        "ns3::TcpL4Protocol::SocketType": ns.TypeIdValue(ns.TypeId.LookupByName(f"ns3::{tcp['algorithm']}")),
        "ns3::TcpL4Protocol::RecoveryType": ns.TypeIdValue(ns.TypeId.LookupByName(f"ns3::{tcp['recovery']}")),
        "ns3::TcpSocket::SegmentSize": ns.UintegerValue(tcp["segment_bytes"]),
        "ns3::TcpSocket::InitialCwnd": ns.UintegerValue(tcp["initial_window"]),
        "ns3::TcpSocket::DelAckCount": ns.UintegerValue(tcp["segments_per_ack"]),
        "ns3::TcpSocket::DelAckTimeout": ns.TimeValue(ns.MilliSeconds(tcp["delayed_ack_ms"])),
        "ns3::TcpSocket::SndBufSize": ns.UintegerValue(_BUFFER_BYTES),
        "ns3::TcpSocket::RcvBufSize": ns.UintegerValue(_BUFFER_BYTES),
        "ns3::TcpSocketBase::MinRto": ns.TimeValue(ns.MilliSeconds(tcp["rto_min_ms"])),
        "ns3::TcpSocketBase::ClockGranularity": ns.TimeValue(ns.MilliSeconds(tcp["clock_ms"])),
        "ns3::TcpSocketBase::Sack": ns.BooleanValue(tcp["sack"]),
        "ns3::TcpSocketBase::Timestamp": ns.BooleanValue(True),
        "ns3::TcpSocketBase::WindowScaling": ns.BooleanValue(True),
    }.items():
        ns.Config.SetDefault(name, value)


class _Network:
    """The nodes and their links; addresses by (node, peer)."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._kept: list[Any] = []
        count, star = told["nodes"], told["topology"] == "star"
        self.nodes = ns.NodeContainer()
        self.nodes.Create(count + star)
        stack = ns.InternetStackHelper()
        stack.Install(self.nodes)
        self._address: dict[tuple[int, int], Any] = {}
        for number, link in enumerate(told["links"]):
            near, far = number, count if star else number + 1
            addresses = self._link(number, link, near, far, told["mtu"])
            self._address[far, near], self._address[near, far] = addresses
        self._star, self._hub = star, count
        ns.Ipv4GlobalRoutingHelper.PopulateRoutingTables()

    def address(self, source: int, target: int) -> Any:
        """Return the address at which `source` reaches `target`."""
        return self._address[self._hub if self._star else source, target]

    def _link(self, number: int, link: dict[str, Any], near: int, far: int, mtu: int) -> tuple[Any, Any]:
        """Connect two nodes; returns the addresses of the near and of the far end."""
        channel = ns.CreateObject[ns.SimpleChannel]()
        channel.SetAttribute("Delay", ns.TimeValue(ns.NanoSeconds(link["delay_ns"])))
        devices = ns.NetDeviceContainer()
        made = []
        for node, way in ((near, link["up"]), (far, link["down"])):
            device = ns.CreateObject[ns.SimpleNetDevice]()
            device.SetAttribute("PointToPointMode", ns.BooleanValue(True))
            device.SetAttribute("DataRate", ns.DataRateValue(ns.DataRate(way["rate_bps"])))
            device.SetAddress(ns.Mac48Address.Allocate().ConvertTo())
            queue = ns.CreateObject[ns.DropTailQueue["Packet"]]()
            queue.SetAttribute("MaxSize", ns.QueueSizeValue(ns.QueueSize(f"{way['queue_packets']}p")))
            _helpers.CountDrops(queue)
            device.SetQueue(queue)
            device.SetMtu(mtu)
            self.nodes.Get(node).AddDevice(device)
            device.SetChannel(channel)
            devices.Add(device)
            made.append((device, way["loss"]))
        for (device, _), (_, lost) in zip(
            made, reversed(made), strict=True
        ):  # the far end's packets are lost where they arrive
            if lost:
                errors = ns.CreateObject[ns.RateErrorModel]()
                errors.SetUnit(ns.RateErrorModel.ERROR_UNIT_PACKET)
                errors.SetRate(lost)
                errors.AssignStreams(1000 + 2 * number + len(self._kept) % 2)
                _helpers.Begin(_BEGIN_NS, errors)
                device.SetReceiveErrorModel(errors)
                self._kept.append(errors)
        helper = ns.Ipv4AddressHelper()
        helper.SetBase(ns.Ipv4Address(f"10.0.{number}.0"), ns.Ipv4Mask("255.255.255.0"))
        held = helper.Assign(devices)
        self._kept += [devices, channel]
        return held.GetAddress(0), held.GetAddress(1)


class _Job:
    """The lanes, and the messages between them."""

    def __init__(self, told: dict[str, Any], network: _Network) -> None:
        self._lanes = told["lanes"]
        self._at = [(0, 0) for _ in self._lanes]
        """Step and operation of each lane."""
        self._ends = [[0] * len(lane["steps"]) for lane in self._lanes]
        self._waits: dict[Any, list[int]] = defaultdict(list)
        self._events: dict[int, int] = defaultdict(int)
        self._there: set[tuple[int, int, int]] = set()
        """Messages that have arrived: (node, peer, tag)."""
        self._numbers: dict[tuple[int, int], int] = {}
        self._expected: list[deque[list[int]]] = []
        self._ways: list[tuple[int, int]] = []
        self._listeners = []
        _playing[:] = [self]
        pairs = {
            (lane["node"], peer) for lane in self._lanes for step in lane["steps"] for k, peer, _, _ in step if k == 1
        }
        for lower, higher in sorted({(min(pair), max(pair)) for pair in pairs}):
            self._connect(network, lower, higher)

    def run(self) -> dict[str, Any]:
        """Play it; returns when its steps ended, and counts."""
        for number in range(len(self._lanes)):
            _helpers.At(_BEGIN_NS, number)
        ns.Simulator.Run()
        stuck = [number for number, (step, _) in enumerate(self._at) if step < len(self._lanes[number]["steps"])]
        if stuck:
            sys.exit(f"cannot play the job in ns-3: lanes {stuck} wait for ever")
        ends = [max(lane) - _BEGIN_NS for lane in zip(*self._ends, strict=True)]
        counts = {name: getattr(_helpers, name) for name in ("timeouts", "recoveries", "dropped")}
        return {"step_ends_ns": ends, **counts}

    def _connect(self, network: _Network, lower: int, higher: int) -> None:
        for pair in ((lower, higher), (higher, lower)):
            self._numbers[pair] = len(self._ways)
            self._ways.append(pair)
            self._expected.append(deque())
        kind = ns.TcpSocketFactory.GetTypeId()
        listener = ns.Socket.CreateSocket(network.nodes.Get(higher), kind)
        listener.Bind(ns.InetSocketAddress(ns.Ipv4Address.GetAny(), _PORT + lower).ConvertTo())
        listener.Listen()
        _helpers.Accept(self._numbers[higher, lower], listener)
        socket = ns.Socket.CreateSocket(network.nodes.Get(lower), kind)
        socket.Bind()
        _helpers.Watch(self._numbers[lower, higher], socket)
        socket.Connect(ns.InetSocketAddress(network.address(lower, higher), _PORT + lower).ConvertTo())
        self._listeners.append(listener)

    def came(self, end: int, count: int) -> None:
        """Note bytes that `end` has read."""
        node, peer = self._ways[end]
        expected = self._expected[end]
        while count:
            message = expected[0]
            taken = min(count, message[1])
            message[1] -= taken
            count -= taken
            if not message[1]:
                expected.popleft()
                self._there.add((node, peer, message[0]))
                self._wake((node, peer, message[0]))

    def _wake(self, what: Any) -> None:
        for number in self._waits.pop(what, ()):
            self.go_on(number)

    def go_on(self, number: int) -> None:
        """Perform a lane's operations until one takes time."""
        lane = self._lanes[number]
        while (step := self._at[number][0]) < len(lane["steps"]):
            operations, index = lane["steps"][step], self._at[number][1]
            if index == len(operations):
                self._ends[number][step] = _helpers.Now()
                self._at[number] = (step + 1, 0)
                continue
            kind, peer, tag, value = operations[index]
            node = lane["node"]
            if kind == 2 and (node, peer, tag) not in self._there:
                self._waits[node, peer, tag].append(number)
                return
            if kind == 4 and self._events[tag] < value:
                self._waits["event", tag].append(number)
                return
            self._at[number] = (step, index + 1)
            if kind == 0 and value:
                _helpers.At(value, number)
                return
            if kind == 1:
                self._expected[self._numbers[peer, node]].append([tag, value])
                if _helpers.Send(self._numbers[node, peer], value) != value:
                    sys.exit(f"cannot play the job in ns-3: a socket refused a message of {value} bytes")
            elif kind == 3:
                self._events[tag] += 1
                self._wake(("event", tag))


_playing: list[_Job] = []


def _due(number: int) -> None:
    _playing[0].go_on(number)


def _came(end: int, count: int) -> None:
    _playing[0].came(end, count)


def main() -> None:
    """Play the jobs on standard input, one per line; print a line for each."""
    _helpers.due, _helpers.came = _due, _came  # once: they are never freed
    for line in sys.stdin:
        told = json.loads(line)
        ns.RngSeedManager.SetSeed(1)
        ns.RngSeedManager.SetRun(told["seed"])
        _configure(told["tcp"])
        _helpers.timeouts = _helpers.recoveries = _helpers.dropped = 0
        print(json.dumps(_Job(told, _Network(told)).run()), flush=True)
        ns.Simulator.Destroy()
        _helpers.sockets.clear()


main()
