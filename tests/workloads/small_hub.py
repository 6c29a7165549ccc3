"""A Hugging Face hub of one data set, on loopback: what `huggingface_hub` and `datasets` ask when they load one; a
cache that holds one; and the command that loads it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve(name: str, files: dict[str, bytes]) -> Iterator[str]:
    """The endpoint of a hub with the data set `name`, whose repository holds `files`."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None: ...

        def reply(self, content: Any, status: int = 200, **headers: str) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body)), "X-Repo-Commit": _COMMIT}.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if found := re.fullmatch(rf"/datasets/{name}/resolve/\w+/(.+)", path):
                if (content := files.get(found[1])) is None:
                    self.reply({}, 404, X_Error_Code="EntryNotFound")
                else:
                    self.reply(content, ETag=f'"{hashlib.sha1(content).hexdigest()}"')
            elif re.fullmatch(rf"/api/datasets/{name}(/revision/\w+)?", path):
                self.reply({"id": name, "sha": _COMMIT, "siblings": [{"rfilename": file} for file in files]})
            elif re.fullmatch(rf"/api/datasets/{name}/tree/\w+", path):
                entries = [(file, len(content), hashlib.sha1(content).hexdigest()) for file, content in files.items()]
                self.reply([{"type": "file", "path": file, "size": size, "oid": oid} for file, size, oid in entries])
            else:
                self.reply({}, 404, X_Error_Code="RepoNotFound")

        do_HEAD = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def closed() -> str:
    """An endpoint that refuses connections."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


def cached(home: Path, name: str, configuration: str, files: dict[str, Path]) -> None:
    """Leave a data set of .parquet files, by split, in the cache below `home` as load_dataset does that has fetched
    it.
    """
    made = datasets.load_dataset(
        "parquet", data_files={split: str(path) for split, path in files.items()}, cache_dir=str(home / "made")
    )
    (folder,) = {Path(file["filename"]).parent for split in made.values() for file in split.cache_files}
    owner, _, own_name = name.partition("/")
    place = home / "hf" / "datasets" / f"{owner}___{own_name}" / configuration / "0.0.0" / "abc123"
    place.mkdir(parents=True)
    for file in folder.iterdir():
        content = file.read_bytes()
        if file.name == "dataset_info.json":
            content = json.dumps(
                json.loads(content) | {"config_name": configuration, "dataset_name": own_name}
            ).encode()
        (place / file.name.replace("parquet-", f"{own_name}-")).write_bytes(content)


def prepare(home: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run testbed.workloads.prepare with our cache in `home`/c, and the libraries' in `home`/hf."""
    command = [sys.executable, "-m", "testbed.workloads.prepare", *options, "--cache", str(home / "c")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG", "HF_"))}
    kept |= {"HOME": str(home), "HF_HOME": str(home / "hf")} | environment
    return subprocess.run(command, capture_output=True, text=True, env=kept, check=False)
