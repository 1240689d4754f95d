"""The connections of an S3 client: each answer has a deadline, which grows with its size.

botocore's timeouts start again with each byte, as urllib3's do. The limits are those of the HTTP
client, which botocore's own connections take here.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from botocore.awsrequest import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPResponse,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
)

from steadytrain.components.shared import http_client
from steadytrain.components.shared.http_client import Answer, Limited, Limits
from steadytrain.components.shared.retry import request_context


class _Answer(Answer, AWSHTTPResponse):
    """An answer within limits, whose status botocore may have read already."""


class _Limited(Limited):
    """A connection whose late answers are timeouts, which botocore and boto3 retry.

    boto3 sends requests in threads of its own, where no context of the caller holds.
    """

    def _begin(self) -> None:
        until = min(request_context().until, time.monotonic() + http_client.SECONDS)
        self._limits = Limits(until, in_pieces=True, late=TimeoutError)

    def getresponse(self) -> Any:
        # botocore resets the class with each request.
        status = getattr(self.response_class, "keywords", {}).get("status_tuple")
        self.response_class = partial(_Answer, self._limits, status_tuple=status)
        return super().getresponse()  # type: ignore[misc]


class _Plain(_Limited, AWSHTTPConnection):  # type: ignore[misc]
    pass


class _Secure(_Limited, AWSHTTPSConnection):  # type: ignore[misc]
    pass


class _PlainPool(AWSHTTPConnectionPool):
    ConnectionCls = _Plain


class _SecurePool(AWSHTTPSConnectionPool):
    ConnectionCls = _Secure


def limit(client: Any) -> None:
    """Give the requests of a new client of boto3 their limits."""
    # botocore has no setting for it.
    session = client._endpoint.http_session
    session._pool_classes_by_scheme.update(http=_PlainPool, https=_SecurePool)
