"""What every test stands on, and the tiers.  pytest loads it before any test module."""

pytest_plugins = [
    f"tests.support.{name}"
    for name in (
        "ground",  # first: the others start processes
        "tiers",
        "skip_report",
        "quick_composing",
        "hub_client",
    )
]
