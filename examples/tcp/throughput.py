"""Measure how fast one TCP connection carries data, and how long a small request takes, like a very small iperf3.

throughput.py server            throughput.py client HOST [SECONDS]
"""

import socket
import statistics
import sys
import time

PORT, ROUNDS = 5201, 20


def server() -> None:
    with socket.create_server(("", PORT)) as listener:
        connection, _ = listener.accept()
        for _ in range(ROUNDS):
            connection.sendall(connection.recv(1))
        received, begin = 0, time.monotonic()
        while data := connection.recv(1 << 16):
            received += len(data)
        seconds = time.monotonic() - begin
        print(f"received {received} bytes in {seconds:.6f} s: {received * 8e-6 / seconds:.3f} Mbit/s", flush=True)


def client(host: str, seconds: float) -> None:
    for _ in range(50):
        try:
            connection = socket.create_connection((host, PORT))
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    times = []
    for _ in range(ROUNDS):
        begin = time.monotonic()
        connection.sendall(b"?")
        connection.recv(1)
        times.append(time.monotonic() - begin)
    print(f"round trip: median {1e3 * statistics.median(times):.6f} ms, longest {1e3 * max(times):.6f} ms", flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        connection.sendall(bytes(1 << 16))
    connection.close()


if __name__ == "__main__":
    server() if sys.argv[1] == "server" else client(sys.argv[2], float((sys.argv[3:] or ["10"])[0]))
