"""Pooling of sets: bags of instances, nodes of graphs, tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rotp_vision.layers.base import ROTPool


class ROTSetPool(ROTPool):
    """ROT pooling of sets of vectors, padded with a mask or packed with lengths.

    Args:
        options: `PoolOptions`, a mapping of its fields, or a solver's name.
        num_features: D; needed only for attention priors and a gain per channel.

    Shapes:
        (B, N, D) to (B, D).

    Example:
        >>> import torch
        >>> from rotp_vision.layers import ROTSetPool
        >>> pool = ROTSetPool('sinkhorn')
        >>> bags = torch.rand(2, 5, 8)
        >>> pool(bags, mask=torch.tensor([[True] * 5, [True] * 3 + [False] * 2])).shape
        torch.Size([2, 8])
        >>> pool.forward_packed(torch.rand(8, 8), lengths=[5, 3]).shape
        torch.Size([2, 8])
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Pooled (B, D) of padded sets `x` (B, N, D); `mask` (B, N) is True where a sample exists."""
        if x.dim() != 3:
            raise ValueError(f'x must be sets of shape (B, N, D), got {tuple(x.shape)}')
        return self.pool_sets(x.transpose(1, 2), mask)

    def forward_packed(self, x: Tensor, lengths: Sequence[int] | Tensor) -> Tensor:
        """Pooled (B, D) of B sets that lie one after the other in `x` (ΣN, D), with `lengths` (B,).

        Lengths given as a list cost no device synchronisation.
        """
        sizes = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
        if x.dim() != 2 or not sizes or min(sizes) < 1 or sum(sizes) != x.shape[0]:
            raise ValueError(
                f'lengths must be positive and add up to the rows of x (ΣN, D), got lengths that add up to '
                f'{sum(sizes)} with least {min(sizes, default=0)} for x of shape {tuple(x.shape)}'
            )
        padded = pad_sequence(list(x.split(sizes)), batch_first=True)  # (B, N, D)
        mask = torch.arange(padded.shape[1])[None, :] < torch.tensor(sizes)[:, None]
        return self.forward(padded, mask.to(x.device, non_blocking=True))
