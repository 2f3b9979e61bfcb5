"""A real S3 server on loopback for tests: SeaweedFS, one process, in a folder of its own.

Every port of it also takes the port 10000 above (gRPC), so all are chosen below 50000; listeners on fixed ports
are switched off, or two servers would collide. Its data are disposable: it is ended by SIGKILL.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

ACCESS_KEY: Final = "testkey"
SECRET_KEY: Final = "testsecret"
REGION: Final = "us-east-1"
READY_S: Final = 60.0
STARTS: Final = 5
_GRPC_ABOVE: Final = 10_000


class Seaweed:
    """A server that was started in `folder`; `kill` and `start` it again, and its objects are still there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: list[int] = []
        self._log = folder / "log"

    @property
    def port(self) -> int:
        return self._ports[3]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> Mapping[str, str]:
        """What a client of this server finds in its environment."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @property
    def runs(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """On the ports of the last time, if there was one; ready for requests on return."""
        for _ in range(STARTS):
            self._ports = self._ports or _free_ports(5)
            if self._try_to_start():
                return
            self.kill()
            self._ports = []
        raise AssertionError(f"SeaweedFS does not start: {self._log.read_text(errors='replace')[-2000:]}")

    def kill(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        self._process = None
        for port in self._ports:
            for each in (port, port + _GRPC_ABOVE):
                for path in Path("/tmp").glob(f"seaweedfs-*-{each}.sock"):  # whatever TMPDIR says
                    path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """The server takes connections and answers nothing."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)

    def make_bucket(self, name: str) -> None:
        from botocore.session import Session

        client = Session().create_client(
            "s3",
            region_name=REGION,
            endpoint_url=self.endpoint,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )
        client.create_bucket(Bucket=name)

    # -- starting

    def _try_to_start(self) -> bool:
        data = self._folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        identity = {
            "name": "test",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        }
        config = self._folder / "s3.json"
        config.write_text(json.dumps({"identities": [identity]}))
        master, volume, filer, s3, admin = self._ports
        command = [
            str(Path(sys.executable).with_name("weed")),
            *("mini", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-s3.port={s3}"),
            *(f"-s3.config={config}", f"-admin.port={admin}", "-webdav=false", "-admin.ui=false"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0"),
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder)
        return self._is_ready()

    def _is_ready(self) -> bool:
        """Whether it answers, and takes an object: the first comes seconds before the second."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            assert self._process is not None
            try:
                self._process.wait(0.05)
                return False  # a port was taken
            except subprocess.TimeoutExpired:
                pass
            try:
                with urllib.request.urlopen(f"{self.endpoint}/healthz", timeout=5):
                    pass
                self._put_and_delete()
                return True
            except (OSError, urllib.error.URLError):
                continue
        return False

    def _put_and_delete(self) -> None:
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.session import Session

        client = Session().create_client(
            "s3",
            region_name=REGION,
            endpoint_url=self.endpoint,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=Config(retries={"total_max_attempts": 1}),
        )
        try:
            client.create_bucket(Bucket="ready")
            client.put_object(Bucket="ready", Key="ready", Body=b"x")
            client.delete_object(Bucket="ready", Key="ready")
            client.delete_bucket(Bucket="ready")
        except (BotoCoreError, ClientError) as error:
            raise OSError(str(error)) from error


def _free_ports(count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(20_000, 30_000)
        if port not in found and _is_free(port) and _is_free(port + _GRPC_ABOVE):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
