"""Whether every node of the cluster sees the models that its processes will open, those of the Hub's cache too.

Asked once the nodes are known and before a process of the run is started.  The node that asks has looked already.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

import ray

from mcore_rl.ground.errors import Violation, refuse_if_any
from mcore_rl.hub.names import named
from mcore_rl.runtime.cluster import on_node


async def demand_seen(paths: Mapping[str, Path], nodes: Collection[str]) -> None:
    """Raises ConfigError with each of ``paths``, by key, that is no directory on one of ``nodes``, by Ray's ids."""
    here = ray.get_runtime_context().get_node_id()
    texts = {key: str(path) for key, path in paths.items()}
    names = {each["NodeID"]: str(each["NodeName"]) for each in ray.nodes() if each["NodeID"] in nodes}
    asked = {name: on_node(unseen, node).remote(texts) for node, name in names.items() if node != here}
    refuse_if_any(unseen_violations(texts, {name: await answer for name, answer in asked.items()}))


def unseen(paths: Mapping[str, str]) -> list[str]:
    """The keys of ``paths`` that are no directories on this machine."""
    return [key for key, path in paths.items() if not os.path.isdir(path)]


def unseen_violations(paths: Mapping[str, str], by_node: Mapping[str, list[str]]) -> list[Violation]:
    """A violation for each key that some node does not see.  by_node: what ``unseen`` said there."""
    wrong = []
    for key, path in paths.items():
        blind = sorted(node for node, keys in by_node.items() if key in keys)
        if not blind:
            continue
        problem = f"is not seen by {', '.join(blind[:4])}{f' and {len(blind) - 4} more' if blind[4:] else ''}"
        remedy = "Put it on a file system that all nodes see"
        if named(path) != path:
            problem = f"was downloaded to {path}, which {problem}"
            remedy = f"{remedy}: set HF_HOME to a folder there"
        wrong.append(Violation(key, named(path), problem, remedy))
    return wrong
