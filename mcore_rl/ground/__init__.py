"""What every room stands on, and what stands on none: errors, secrets, JSON, and the records that travel.

Users' programs import from ``errors`` and ``types`` of the package's root, which have these names too.
"""
