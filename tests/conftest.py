"""What all tests share: readable failures of the conformance suites, and reproducible random tests."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("ckptstore.testing.conformance")

# The machine is shared and slow at times: examples are bounded by number, never by time.
settings.register_profile(
    "ckptstore", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ckptstore")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        help="play many more seeds of the simulated protocol: minutes, not seconds",
    )
