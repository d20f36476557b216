"""Processes and devices, without a model: parallel layout, process groups, platform, and starting local ranks.

Read ``layout.py`` first, then ``groups.py``.
"""

import warnings

# Warnings that Megatron causes in every process and no user can act on.  The banner lists what is installed.
for _message, _category in (
    ("(Transformer Engine and )?Apex (is|are) not installed", UserWarning),
    ("full scope is deprecated", UserWarning),  # of a setting's own default
    ("`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated", FutureWarning),
    ("The .grad attribute of a Tensor that is not a leaf Tensor is being accessed", UserWarning),  # zero_grad
):
    warnings.filterwarnings("ignore", _message, _category)
