"""What every test stands on, and the tiers.  pytest loads it before any test module."""

pytest_plugins = ["tests.support.ground", "tests.support.tiers", "tests.support.quick_composing"]
