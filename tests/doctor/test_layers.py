"""The verdict on layers; the measurement runs in tests/doctor/test_command.py."""

from __future__ import annotations

import torch

from mcore_rl.config.engine import Precision
from mcore_rl.doctor.checks import Verdict
from mcore_rl.doctor.layers import layer_diagnosis, sample_batch

REFERENCE_T = torch.linspace(-3, 0, 100)


def test_rounding_passes_and_more_does_not() -> None:
    scores = {"tp=2": REFERENCE_T + 5e-6, "cp=2": REFERENCE_T.clone()}
    good = layer_diagnosis("layers", REFERENCE_T, scores, Precision.float32)
    assert good.verdict is Verdict.PASS and good.numbers["logprob_difference_cp2"] == 0.0
    one = REFERENCE_T.clone()
    one[17] += 2e-4
    bad = layer_diagnosis("layers", REFERENCE_T, scores | {"ep=2": one}, Precision.float32)
    assert bad.verdict is Verdict.FAIL and bad.remedy.startswith("ep=2 computes something else")
    assert layer_diagnosis("layers", REFERENCE_T, {"ep=2": one}, Precision.bfloat16).verdict is Verdict.PASS
    everywhere = {"tp=2": REFERENCE_T + 0.02}
    assert layer_diagnosis("layers", REFERENCE_T, everywhere, Precision.bfloat16).verdict is Verdict.FAIL, "the mean"


def test_what_is_no_number_is_wrong() -> None:
    scores = {"tp=2": REFERENCE_T * float("nan")}
    assert layer_diagnosis("layers", REFERENCE_T, scores, Precision.bfloat16).verdict is Verdict.FAIL


def test_the_sample_suits_every_layout() -> None:
    batch = sample_batch(300)
    assert all(length % 4 == 0 for length in batch.lengths_S)
    assert int((~batch.mask_T).sum()) == len(batch.lengths_S) and int(batch.tokens_T.max()) < 300
