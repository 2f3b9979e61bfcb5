"""What an S3 server says when it refuses, or botocore when there is no server: whether to try again, and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ckptstore.store.request import Kind, RequestError

_CREDENTIALS: Final = "correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give storage_options profile="
_ADVICE: Final = {
    "NoSuchBucket": "make the bucket, or correct the URL",
    "AccessDenied": "let these credentials read, write, list and delete there",
    "AllAccessDisabled": "let these credentials read, write, list and delete there",
    "InvalidAccessKeyId": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
    "ExpiredToken": "renew the credentials",
    "InvalidToken": "renew the credentials",
    "RequestTimeTooSkewed": "set the clock of this machine",
    "PermanentRedirect": "set AWS_DEFAULT_REGION to the region of the bucket",
    "AuthorizationHeaderMalformed": "set AWS_DEFAULT_REGION to the region of the bucket",
    "NotImplemented": "this server lacks a request that a run needs: use another",
    "EntityTooLarge": "the server takes no object of this size: save smaller tensors, or on more ranks",
    "403": "correct the credentials, or let them read, write, list and delete there",
    "301": "set AWS_DEFAULT_REGION to the region of the bucket",
}
_KINDS: Final[Mapping[str, Kind]] = {
    "NoSuchKey": "absent",
    "PreconditionFailed": "taken",
    "ConditionalRequestConflict": "again",
    "OperationAborted": "again",
    "InvalidRange": "beyond",
    "RequestTimeout": "maybe",
    "NotImplemented": "refused",
    "404": "absent",  # the reply to HEAD says no more
    "412": "taken",
    "416": "beyond",
    "429": "again",
}


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Failures of botocore as RequestErrors."""
    from botocore import exceptions as said

    try:
        yield
    except said.ClientError as error:
        raise refusal(error.response) from error
    except (said.NoCredentialsError, said.PartialCredentialsError, said.ProfileNotFound) as error:
        raise RequestError(
            "refused", str(error), "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
        ) from error
    except said.SSLError as error:
        raise RequestError(
            "refused", str(error), "set AWS_CA_BUNDLE to the certificates of its authority"
        ) from error
    except (said.EndpointConnectionError, said.ConnectTimeoutError, said.ProxyConnectionError) as error:
        advice = "see that the server runs and that AWS_ENDPOINT_URL names it, and try again"
        raise RequestError("again", str(error), advice) from error
    except (said.HTTPClientError, said.IncompleteReadError) as error:
        raise RequestError("maybe", str(error)) from error
    except (said.BotoCoreError, ValueError) as error:  # an endpoint that is no URL, a wrong file of settings
        raise RequestError("refused", str(error), "correct the settings of AWS_… and ~/.aws") from error


def refusal(reply: Mapping[str, Any]) -> RequestError:
    """What the server said, as S3 means it. 5xx tells nothing of what became of a write."""
    code = str(reply.get("Error", {}).get("Code", ""))
    text = str(reply.get("Error", {}).get("Message", ""))
    status = int(reply.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    kind = _KINDS.get(code)
    if kind is None:
        kind = "maybe" if status >= 500 else "refused"
    if kind == "refused" and code not in _ADVICE and str(status) in _KINDS and status != 404:
        kind = _KINDS[str(status)]
    advice = _ADVICE.get(code) or _ADVICE.get(str(status)) or "see what the server says, and correct it"
    return RequestError(kind, f"{code or status} {text}".strip(), advice)
