"""Contradictions between ``data.image_key``, which gives models the pictures of rows, and other settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mcore_rl.config.data import ImagesConfig
from mcore_rl.config.roles import RoleConfig, SeeingConfig
from mcore_rl.errors import Violation


def picture_violations(data: object, roles: Mapping[str, RoleConfig]) -> Iterator[Violation]:
    """Settings of pictures where models are given none, and microbatches that cannot hold any.

    data: the group ``data``.  roles: the configuration of each role with processes of its own, by name.
    """
    may_see = isinstance(data, ImagesConfig)
    if isinstance(data, ImagesConfig) and data.sees_pictures:
        for name, role in roles.items():
            if role.microbatch_sequences is not None:
                problem = "leaves sequences unpacked, and those with pictures are packed"
                remedy = f"Write {name}.microbatch_tokens=16384, say, in its place"
                yield Violation(f"{name}.microbatch_sequences", role.microbatch_sequences, problem, remedy)
        return
    problem = "is not read: the model is given no pictures"
    remedy = "Leave it out, or write data.image_key=images, say" if may_see else "Leave it out"
    for name, role in roles.items():
        if role.microbatch_patches is not None:
            yield Violation(f"{name}.microbatch_patches", role.microbatch_patches, problem, remedy)
        if isinstance(role, SeeingConfig) and role.vision is not None:
            yield Violation(f"{name}.vision", role.vision.value, problem, remedy)
