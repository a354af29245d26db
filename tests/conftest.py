import subprocess
import sys

import pytest


@pytest.fixture(scope="session")
def project_python():
    """Run code in a fresh interpreter of this environment; returns what it printed, fails on an error."""

    def run(code: str, **kwargs) -> str:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **kwargs)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
