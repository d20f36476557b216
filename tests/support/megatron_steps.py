"""Steps of a tiny mixture in a process of its own, for whichever megatron-core stands first on its path.

    python -m tests.support.megatron_steps ROOT begin    # four steps; the state after two goes to ROOT/state
    python -m tests.support.megatron_steps ROOT go-on    # steps 3 and 4 from ROOT/state

Prints, as JSON, the version, and of each rank the losses and the digests of its weights and its optimizer's state.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from torch import Tensor

from mcore_rl.config.megatron_versions import megatron_version
from mcore_rl.parallel.launch import Rank
from mcore_rl.training.run_state import load_run_state
from tests.support import checkpoints, engines
from tests.support.forked import run_ranks
from tests.support.saved_states import engine_of, save, table_of, train

FAMILY, LAYOUT = "mixtral", "tp=2"
Steps = tuple[list[float], list[str]]


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().float().contiguous().numpy().tobytes()).hexdigest()


def _steps(rank: Rank, root: Path, begins: bool) -> Steps:
    with engines.world(rank), engines.groups_of(LAYOUT) as groups:
        table = table_of(groups, FAMILY, checkpoints.MODELS[FAMILY], LAYOUT)
        engine = engine_of(groups, table, LAYOUT, root / FAMILY, "bfloat16")
        if begins:
            train(engine, groups, 0, 2)
            assert save(engine, table, root / "state").problem is None
        else:
            assert load_run_state(engine, table, root / "state")
        losses = train(engine, groups, 2, 2)
        return losses, [digest(each) for each in (*engines.weights_of(engine).values(), *engines.state_of(engine))]


if __name__ == "__main__":
    root, begins = Path(sys.argv[1]), sys.argv[2] == "begin"
    print(json.dumps({"version": megatron_version(), "ranks": run_ranks(_steps, 2, (root, begins), timeout_s=300)}))
