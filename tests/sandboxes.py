"""Whether tests can run model-written code here."""

import pytest

from es_cookbook.common.errors import SandboxError
from es_cookbook.rl.grading.sandbox import check_sandbox


def why_not() -> str:
    """Return why this machine has no sandbox; empty if it has one."""
    try:
        check_sandbox()
    except SandboxError as error:
        return str(error)
    return ""


needs_sandbox = pytest.mark.skipif(bool(why_not()), reason=why_not())
