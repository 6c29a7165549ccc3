#!/bin/bash
# Prove by trying that this kernel shapes links as testbed asks: check_netem.sh, as root. Exit status 0, or 1 and what is missing.
# All happens in a network namespace that ends with the script. Needs iproute2, util-linux and python3.
set -euo pipefail

if [ "${1:-}" != inside ]; then
  for command in ip tc unshare python3; do
    if ! command -v "$command" >/dev/null; then
      echo "check_netem: there is no command $command; install iproute2, util-linux and python3" >&2
      exit 1
    fi
  done
  if ! unshare --net true 2>/dev/null; then
    echo 'check_netem: no network namespace can be made; run it as root, in a container with --privileged' >&2
    exit 1
  fi
  exec unshare --net "$0" inside
fi

fail() {
  echo "check_netem: $*" >&2
  exit 1
}

printf '%s\n' 6.6 "$(uname -r)" | sort --version-sort --check=quiet ||
  fail "the kernel $(uname -r) is older than 6.6, whose netem takes a seed; take Debian 13, Ubuntu 24.04 or later"
ip link add v0 type veth peer name v1 2>/dev/null || fail 'this kernel makes no veth devices'

# A module's file says little (containers, cloud kernels): the kernel must take the qdisc, with each effect, and say that it has it.
tc qdisc add dev v0 root netem delay 5ms 2>/dev/null || fail "the kernel $(uname -r) has no sch_netem, or may not load it"
try() { # try WORDS-READ-BACK OPTIONS...
  local words=$1 held
  shift
  tc qdisc replace dev v0 root netem limit 1000 "$@" 2>/dev/null || fail "netem refuses: $*"
  held=$(tc qdisc show dev v0 root)
  [[ $held == *"$words"* ]] || fail "asked netem for $*, the kernel has: $held"
}
try 'rate 80Mbit' rate 80mbit delay 25ms
try 'loss gemodel p 1% r 30% 1-h 100% 1-k 0%' rate 80mbit loss gemodel 1% 30% 100% 0%
try 'delay 25ms  5ms' rate 80mbit delay 25ms 5ms
try 'reorder 1%' rate 80mbit delay 25ms reorder 1%
try 'duplicate 1%' rate 80mbit duplicate 1%
try 'slot 1ms 2ms' rate 80mbit slot 1ms 2ms

# And it must do it: a datagram to oneself waits 25 ms.
ip link set lo up
tc qdisc add dev lo root netem delay 25ms
python3 - <<'PYTHON' || fail 'netem holds a delay of 25 ms and does not delay by it'
import socket
import statistics
import sys
import time

receiver, sender = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
receiver.bind(("127.0.0.1", 0))
receiver.settimeout(1)
found = []
for _ in range(20):
    begin = time.monotonic()
    sender.sendto(b"testbed", receiver.getsockname())
    receiver.recv(16)
    found.append(1000 * (time.monotonic() - begin))
middle = statistics.median(found)
print(f"check_netem: netem takes every effect; 25 ms of delay take {middle:.2f} ms (median of {len(found)})")
sys.exit(not 25 <= middle < 30)
PYTHON
