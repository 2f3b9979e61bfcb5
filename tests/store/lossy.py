"""A loopback proxy before a server that carries every request and loses the reply of those it was told to."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Final

_CONTINUE: Final = b"HTTP/1.1 100"


class LossyProxy:
    """`lose` judges the first line of each request (`PUT /bucket/key HTTP/1.1`); `lost` counts."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._server_port = port
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self.lose: Callable[[str], bool] = lambda request: False
        self.lost: list[str] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self._tls is not None:
                    connection = self._tls.wrap_socket(connection, server_side=True)
                server = socket.create_connection(("127.0.0.1", self._server_port))
            except OSError:  # a client that does not trust the certificate, a server that was killed
                connection.close()
                continue
            _Pair(self, connection, server)

    def judge(self, request: str) -> bool:
        with self._lock:
            if self.lose(request):
                self.lost.append(request)
                return True
        return False


class _Pair:
    """One connection and its continuation; ended by whichever side ends first, or by the loss of a reply."""

    def __init__(self, proxy: LossyProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client, self._server = client, server
        self._losing = False
        self._idle = True  # the next bytes of the client begin a request
        for carry in (self._carry_requests, self._carry_replies):
            threading.Thread(target=carry, daemon=True).start()

    def _carry_requests(self) -> None:
        with self._ending():
            while data := self._client.recv(1 << 16):
                if self._idle:
                    self._idle = False
                    self._losing = self._proxy.judge(data.split(b"\r\n", 1)[0].decode("latin-1"))
                self._server.sendall(data)

    def _carry_replies(self) -> None:
        with self._ending():
            while data := self._server.recv(1 << 16):
                if data.startswith(_CONTINUE) and data.count(b"\r\n\r\n") == 1 and data.endswith(b"\r\n\r\n"):
                    self._client.sendall(data)
                    continue
                if self._losing:
                    return
                self._idle = True
                self._client.sendall(data)

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            with contextlib.suppress(OSError):
                yield
        finally:
            for each in (self._client, self._server):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()
