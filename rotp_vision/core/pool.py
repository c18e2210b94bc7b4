"""Plan to pooled features: the one formula."""

from torch import Tensor


def pool(features: Tensor, log_plan: Tensor) -> Tensor:
    """Each feature's mean under its row of the plan (paper, eq. "uotp").

        f_d = Σ_n x_dn P_dn / Σ_n P_dn = Σ_n x_dn softmax_n(log P_dn)

    so that neither the mass of the plan nor that of a row matters.

    Args:
        features: (B, D, N) X, any floating dtype; may hold anything finite on masked samples.
        log_plan: (B, D, N) log P up to a constant per row, -inf on masked samples.

    Returns:
        (B, D) in the dtype of `features`.
    """
    if features.shape != log_plan.shape:
        raise ValueError(
            f'features and log_plan must have the same shape, got {tuple(features.shape)} and {tuple(log_plan.shape)}'
        )
    weights = log_plan.softmax(2)
    return (features.to(log_plan.dtype) * weights).sum(2).to(features.dtype)
