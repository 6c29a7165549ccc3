"""A Hugging Face hub of one data set, on loopback: what `huggingface_hub` and `datasets` ask when they load one."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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
