"""Worker processes for all tests, and repeatable property tests."""

from hypothesis import settings

pytest_plugins = ["hybridcp.testing.plugin"]

# A loaded machine is slow, not wrong; and two runs of one commit must agree.
settings.register_profile("hybridcp", deadline=None, derandomize=True)
settings.load_profile("hybridcp")
