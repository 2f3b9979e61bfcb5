"""Objects in a bucket of S3, or of a server that speaks its protocol.

Two clients, each for what it does best. botocore makes the requests that decide something: it sends each
once, tells why one was refused, and a listing is read as it is now. tensorstore's driver carries the bytes of
large objects, in threads of its own and with a third of the CPU time; it sends a request anew unasked when a
used connection breaks, which is harmless for keys that hold a random id. Why these: docs/explanation/performance.md.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

from ckptstore.errors import InvalidInputError
from ckptstore.store.base import ObjectInfo, check_key, is_key_segment
from ckptstore.store.refusal import told
from ckptstore.store.remote import RemoteStore
from ckptstore.store.request import Client, Parts, PartsClient, RequestError, joined

FAST_NBYTES_MIN: Final = 1 << 20  # from here on the bytes cost more than the request
SLOWEST_NBYTES_S: Final = 2 << 20  # a connection that is slower is taken to have stalled
CONNECTIONS_MAX: Final = 32
PAGE_KEYS: Final = 1_000  # of a listing, the most that S3 gives at once
DEFAULT_REGION: Final = "us-east-1"  # where neither options nor environment nor ~/.aws name one
_PID: Final = os.getpid()  # tensorstore's threads do not follow a fork


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """`storage_options=` of `s3://`. What is None is taken from the environment (AWS_…) and ~/.aws.

    `timeout_s`: a request without a reply for so long is given up (large ones get more). `retry_s`: how long
    a failed one is repeated.
    """

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    anonymous: bool = False
    timeout_s: float = 30.0
    retry_s: float = 60.0

    @classmethod
    def of(cls, url: str, given: Mapping[str, Any]) -> S3Options:
        """InvalidInputError names all that is unknown or of another kind."""
        kinds: dict[str, tuple[type, ...]] = {
            **dict.fromkeys(("endpoint_url", "region", "profile"), (str, type(None))),
            "anonymous": (bool,),
            **dict.fromkeys(("timeout_s", "retry_s"), (int, float)),
        }
        wrong = [
            f"{name}={value!r}"
            for name, value in given.items()
            if not isinstance(value, kinds.get(name, ()))
            or (isinstance(value, int | float) and name != "anonymous" and not _is_seconds(value))
        ]
        if wrong:
            raise InvalidInputError(
                f"{url}: storage_options {', '.join(wrong)} cannot be used; there are endpoint_url, region and "
                "profile (text), anonymous (True or False), timeout_s and retry_s (seconds above 0); keys belong "
                "into the environment",
                url=url,
                wrong=tuple(wrong),
            )
        return cls(**given)


def _is_seconds(value: float) -> bool:
    return not isinstance(value, bool) and 0 < value < float("inf")


def open_s3(url: str, storage_options: Mapping[str, Any]) -> RemoteStore:
    """The store of `s3://bucket/prefix`. InvalidInputError if it cannot be one, or a package is missing."""
    options = S3Options.of(url, storage_options)
    parts = urlsplit(url)
    bucket, prefix = parts.netloc, parts.path.strip("/")
    if not bucket or "@" in bucket or ":" in bucket or parts.query or parts.fragment:
        raise InvalidInputError(f"{url} does not name a bucket; write s3://bucket/prefix", url=url)
    if prefix:
        check_key(prefix)
    try:
        import botocore.session
        import tensorstore
    except ImportError as error:
        raise InvalidInputError(
            f"{url} needs the package {error.name}, which is not installed: pip install 'ckptstore[s3]'",
            url=url,
            package=error.name,
        ) from error
    del botocore, tensorstore

    def open_client() -> Client:
        return S3Client(bucket=bucket, prefix=f"{prefix}/" if prefix else "", options=options)

    named = f"s3://{bucket}/{prefix}" if prefix else f"s3://{bucket}"
    return RemoteStore(url=named, open_client=open_client, retry_s=options.retry_s)


class S3Client:
    """A Client of the objects below `prefix` (empty, or ending in `/`) of a bucket."""

    no_create = None

    def __init__(self, *, bucket: str, prefix: str, options: S3Options) -> None:
        self._prefix = prefix
        self._timeout_s = options.timeout_s
        self._bucket = bucket
        with told():
            self._requests, credentials = _botocore(options)
        self._fast: Any = None
        if os.getpid() == _PID:
            self._fast = _tensorstore(bucket, prefix, options, self._requests, credentials)

    def get(self, key: str, start: int, views: Sequence[memoryview]) -> None:
        wanted = sum(view.nbytes for view in views)
        if self._fast is not None and wanted >= FAST_NBYTES_MIN and self._get_fast(key, start, views, wanted):
            return
        with told():
            reply = self._requests.get_object(
                Bucket=self._bucket, Key=self._prefix + key, Range=f"bytes={start}-{start + wanted - 1}"
            )
            with contextlib.closing(reply["Body"]) as body:
                if reply["ContentLength"] < wanted:
                    raise RequestError("beyond", f"{reply['ContentLength']} of {wanted} bytes are there")
                for view in views:
                    while view.nbytes:
                        count = body.readinto(view)
                        if not count:
                            raise RequestError("again", "the reply ended early")
                        view = view[count:]

    def get_rest(self, key: str, start: int) -> bytes:
        part = {"Range": f"bytes={start}-"} if start else {}
        with told():
            reply = self._requests.get_object(Bucket=self._bucket, Key=self._prefix + key, **part)
            with contextlib.closing(reply["Body"]) as body:
                data: bytes = body.read()  # shorter than announced is an error of botocore's
        return data

    def size(self, key: str) -> int:
        with told():
            reply = self._requests.head_object(Bucket=self._bucket, Key=self._prefix + key)
        return int(reply["ContentLength"])

    def put(self, key: str, views: Sequence[memoryview], *, exclusive: bool) -> None:
        data = joined(views)
        large = self._fast is not None and len(data) >= FAST_NBYTES_MIN
        if large and self._put_fast(key, data, exclusive=exclusive):
            return
        with told():
            self._requests.put_object(
                Bucket=self._bucket, Key=self._prefix + key, Body=data, **_condition(exclusive)
            )

    @property
    def parts(self) -> PartsClient:
        return self

    def begin_parts(self, key: str, mark: str) -> str:
        with told():
            reply = self._requests.create_multipart_upload(
                Bucket=self._bucket, Key=self._prefix + key, Metadata={_MARK: mark}
            )
        return str(reply["UploadId"])

    def put_part(self, parts: Parts, number: int, views: Sequence[memoryview]) -> str:
        with told():
            reply = self._requests.upload_part(PartNumber=number, Body=joined(views), **self._of(parts))
        return str(reply["ETag"])

    def end_parts(self, parts: Parts, tags: Sequence[str], *, exclusive: bool) -> None:
        numbered = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
        with told():
            self._requests.complete_multipart_upload(
                MultipartUpload={"Parts": numbered}, **self._of(parts), **_condition(exclusive)
            )

    def drop_parts(self, parts: Parts) -> None:
        with told():
            self._requests.abort_multipart_upload(**self._of(parts))

    def _of(self, parts: Parts) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + parts.key, "UploadId": parts.upload}

    def mark(self, key: str) -> str | None:
        with told():
            reply = self._requests.head_object(Bucket=self._bucket, Key=self._prefix + key)
        found = reply.get("Metadata", {}).get(_MARK)
        return None if found is None else str(found)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with told():
            pages = self._requests.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix, PaginationConfig={"PageSize": PAGE_KEYS}
            )
            for page in pages:
                for each in page.get("Contents", ()):
                    key = each["Key"].removeprefix(self._prefix)
                    if all(map(is_key_segment, key.split("/"))):  # not the markers that stand for folders
                        yield ObjectInfo(key=key, nbytes=int(each["Size"]))

    def delete(self, key: str) -> None:
        with told():
            self._requests.delete_object(Bucket=self._bucket, Key=self._prefix + key)

    def close(self) -> None:
        self._requests.close()
        self._fast = None

    # -- the bytes of large objects

    def _limit_s(self, nbytes: int) -> float:
        return self._timeout_s + nbytes / SLOWEST_NBYTES_S

    def _get_fast(self, key: str, start: int, views: Sequence[memoryview], wanted: int) -> bool:
        """Whether it was done; if not, the other client must ask, which can tell why."""
        limit_s = self._limit_s(wanted)
        try:
            found = self._fast.read(key, byte_range=slice(start, start + wanted)).result(timeout=limit_s)
        except TimeoutError as error:
            raise RequestError("again", f"no reply within {limit_s:.0f} s") from error
        except _FAST_ERRORS as error:
            self._judge_fast(str(error))
            return False
        held = memoryview(found.value)
        if found.state != "value" or held.nbytes != wanted:
            return False
        at = 0
        for view in views:
            # numpy copies without the lock of the interpreter, a memoryview does not
            np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(held[at : at + view.nbytes], np.uint8))
            at += view.nbytes
        return True

    def _put_fast(self, key: str, data: bytes | bytearray, *, exclusive: bool) -> bool:
        """Whether it was done; False if it certainly was not, and the other client can tell why."""
        limit_s, condition = self._limit_s(len(data)), {"if_equal": _NO_VALUE} if exclusive else {}
        try:
            stamp = self._fast.write(key, data, **condition).result(timeout=limit_s)
        except TimeoutError as error:
            raise RequestError("maybe", f"no reply within {limit_s:.0f} s") from error
        except _FAST_ERRORS as error:
            if self._judge_fast(str(error)):
                raise RequestError("maybe", " ".join(str(error).split())[:300]) from error
            return False
        if stamp.generation:
            return True
        # So tensorstore tells a refused condition, but also a bucket that is not there.
        try:
            self.size(key)
        except RequestError as error:
            if error.kind == "absent":
                return False
            raise RequestError("maybe", error.reason, error.advice) from error
        raise RequestError("taken", "the key is taken")

    def _judge_fast(self, said: str) -> bool:
        """Whether a write that failed so may have been done all the same; without its trust, do without it."""
        if "SSL" in said or "credentials" in said:  # it looks elsewhere for certificates and keys
            self._fast = None
            return False
        return re.search(r"http_response_code='(4|501)|Could not connect", said) is None


_FAST_ERRORS: Final = (ValueError, RuntimeError, OSError, KeyError)  # what tensorstore makes of its codes
_MARK: Final = "ckptstore-upload"  # user metadata, kept with the object
_NO_VALUE: Final = b"\x02"  # the generation that tensorstore gives a key without a value


def _condition(exclusive: bool) -> dict[str, str]:
    return {"IfNoneMatch": "*"} if exclusive else {}


def _botocore(options: S3Options) -> tuple[Any, str]:
    """A client of botocore, and the kind of credentials with which tensorstore finds the same keys."""
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.session import Session

    session = Session(profile=options.profile)
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    region = options.region or session.get_config_variable("region") or DEFAULT_REGION
    config = Config(
        connect_timeout=min(10.0, options.timeout_s),
        read_timeout=options.timeout_s,
        retries={"total_max_attempts": 1},  # a request that was repeated unseen could meet its own object
        max_pool_connections=CONNECTIONS_MAX,
        # The signature covers the bytes already; a second checksum costs as much as the request.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        **({"signature_version": UNSIGNED} if options.anonymous else {}),
    )
    client = session.create_client("s3", region_name=region, endpoint_url=options.endpoint_url, config=config)
    if not _is_aws(client.meta.endpoint_url):
        # Only now is known what the environment names. Other servers' buckets are seldom names of hosts.
        config = config.merge(Config(s3={"addressing_style": "path"}))
        client = session.create_client(
            "s3", region_name=region, endpoint_url=options.endpoint_url, config=config
        )
    if options.anonymous:
        return client, "anonymous"
    if options.profile is not None:
        return client, "profile"
    found = session.get_credentials()
    return client, "environment" if found is not None and found.method == "env" else "default"


@lru_cache
def _loader(path: str | None) -> Any:
    """What botocore knows of its services, read once a process: most of the time that a client takes to make."""
    from botocore.loaders import create_loader

    return create_loader(path)


def _is_aws(endpoint: str) -> bool:
    return ".amazonaws." in endpoint


def _tensorstore(bucket: str, prefix: str, options: S3Options, requests: Any, credentials: str) -> Any:
    """The same bucket through tensorstore; None if it cannot open it: botocore can do all, slower."""
    import tensorstore

    found = {"type": credentials}
    if options.profile is not None and credentials == "profile":
        found["profile"] = options.profile
    spec: dict[str, Any] = {
        "driver": "s3",
        "bucket": bucket,
        "path": prefix,
        "aws_region": requests.meta.region_name,
        "context": {
            "s3_request_retries": {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"},
            "s3_request_concurrency": {"limit": CONNECTIONS_MAX},
            "aws_credentials": found,
        },
    }
    if not _is_aws(requests.meta.endpoint_url):
        spec["endpoint"] = requests.meta.endpoint_url
    try:
        return tensorstore.KvStore.open(spec).result(timeout=options.timeout_s)
    except (TimeoutError, ValueError):
        return None
