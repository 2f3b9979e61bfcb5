"""What all tests share: readable failures of the conformance suites, and reproducible random tests.

The examples of a property are the same in every run, so that a failure is a change's and not chance's; with
`--long` they are new ones each time. Health checks judge how the examples were drawn, and by the clock: they say
nothing of the code under test, and are off.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.s3_server"]

pytest.register_assert_rewrite("ckptstore.testing.conformance")

# The machine is shared and slow at times: examples are bounded by number, never by time.
for name, derandomize in {"same": True, "new": False}.items():
    settings.register_profile(
        name, deadline=None, print_blob=True, derandomize=derandomize, suppress_health_check=list(HealthCheck)
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        help="play many more seeds of the simulated protocol, and draw new examples: minutes, not seconds",
    )


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("new" if config.getoption("--long") else "same")
