"""What the tests of other APIs talk to: the scripted server of tests/api, and the real model of tests/cases."""

from __future__ import annotations

from tests.api.conftest import _server, api  # noqa: F401
from tests.cases.conftest import real  # noqa: F401
