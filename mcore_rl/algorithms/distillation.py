"""On-policy distillation from a frozen teacher, estimated from the tokens that the policy drew.

The policy minimizes ``KL(policy || teacher)`` of its own samples: MiniLLM (arXiv:2306.08543), and GKD with the reverse
KL (arXiv:2306.13649).  Of a token that the policy drew, ``log p_policy - log p_teacher`` is an unbiased estimate of
that KL given the tokens before it, and its negative is the token's advantage: the policy gradient of these advantages
is, in expectation, that of the KL at each token (Thinking Machines, "On-policy distillation", 2025).  What a token does
to the KL of later ones is left out, as there and in arXiv:2306.13649, which stops the gradient at the samples.
"""

from __future__ import annotations

from torch import Tensor

TEACHER_LOGPROBS = "teacher_logprobs_T"  # the field that the role ``teacher`` makes


def reverse_kl(old_logprobs_T: Tensor, teacher_logprobs_T: Tensor, mask_T: Tensor) -> Tensor:
    """``log p_old - log p_teacher`` at each token of ``mask_T``, 0 elsewhere; [T], nats, of either sign.

    old_logprobs_T: of the policy before the step, at the temperature of the samples, as the teacher's are.
    """
    return (old_logprobs_T - teacher_logprobs_T).masked_fill_(~mask_T, 0)
