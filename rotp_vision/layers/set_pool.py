"""Pooling of sets: bags of instances, nodes of graphs, tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rotp_vision.layers.base import ROTPool


class ROTSetPool(ROTPool):
    """ROT pooling of sets of vectors, padded with a mask or packed with lengths.

    Args:
        options: `PoolOptions`, a mapping of its fields, or a name, see `pool_options`: 'train' suits a network that is
            trained along with its pooling; the default starts next to the mean.
        num_features: D; needed only for attention priors and a gain per channel.

    Shapes:
        (B, N, D) to (B, D).

    Example:
        >>> import torch
        >>> from rotp_vision.layers import ROTSetPool
        >>> pool = ROTSetPool()
        >>> bags, mask = torch.rand(2, 5, 8), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
        >>> pool(bags, mask).shape
        torch.Size([2, 8])
        >>> pool.plan(bags, mask).sum(2).shape  # the weight of each instance, zero where masked, one in all per bag
        torch.Size([2, 5])
        >>> pool(torch.rand(8, 8), lengths=[5, 3]).shape
        torch.Size([2, 8])
    """

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        log_sample_prior: Tensor | None = None,
        *,
        lengths: Sequence[int] | Tensor | None = None,
    ) -> Tensor:
        """Pool padded or packed sets to (B, D).

        Args:
            x: (B, N, D) padded sets or, with `lengths`, (ΣN, D) concatenated sets.
            mask: (B, N), True where a sample exists; None if all do.
            log_sample_prior: (B or 1, N) logits of q0, or (ΣN,) of packed sets, added to those of the layer's
                own prior; None for uniform.
            lengths: (B,) number of samples of each packed set. A list avoids a device synchronisation.
        """
        return self.pool_sets(*_padded(x, mask, log_sample_prior, _sizes(x, mask, lengths)))

    def log_plan(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        log_sample_prior: Tensor | None = None,
        *,
        lengths: Sequence[int] | Tensor | None = None,
    ) -> Tensor:
        """The log plan of each set, of mass one, with the axes of `x`, -inf where masked; arguments as in `forward`."""
        sizes = _sizes(x, mask, lengths)
        log_plan = self.solve_sets(*_padded(x, mask, log_sample_prior, sizes)).transpose(1, 2)
        if sizes is None:
            return log_plan
        return torch.cat([one[:size] for one, size in zip(log_plan, sizes, strict=True)])


def _sizes(x: Tensor, mask: Tensor | None, lengths: Sequence[int] | Tensor | None) -> list[int] | None:
    """The lengths of packed sets, checked; None for padded sets."""
    if lengths is None:
        if x.dim() != 3:
            raise ValueError(f'x must be sets of shape (B, N, D), or (ΣN, D) with lengths, got {tuple(x.shape)}')
        return None
    sizes = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
    if x.dim() != 2 or not sizes or min(sizes) < 1 or sum(sizes) != x.shape[0]:
        raise ValueError(
            f'lengths must be positive and add up to the rows of x (ΣN, D), got lengths that add up to '
            f'{sum(sizes)} with least {min(sizes, default=0)} for x of shape {tuple(x.shape)}'
        )
    if mask is not None:
        raise ValueError('give lengths for packed sets or a mask for padded ones, got both')
    return sizes


def _padded(
    x: Tensor, mask: Tensor | None, log_sample_prior: Tensor | None, sizes: list[int] | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Sets (B, D, N), their mask and the logits of their prior; pads packed sets."""
    if sizes is not None:
        num_samples = torch.tensor(sizes)[:, None]
        mask = (torch.arange(max(sizes))[None, :] < num_samples).to(x.device, non_blocking=True)
        if log_sample_prior is not None:
            if log_sample_prior.shape != x.shape[:1]:
                raise ValueError(
                    f'log_sample_prior of packed sets must have shape ({x.shape[0]},), got '
                    f'{tuple(log_sample_prior.shape)}'
                )
            log_sample_prior = pad_sequence(list(log_sample_prior.split(sizes)), batch_first=True)
        x = pad_sequence(list(x.split(sizes)), batch_first=True)  # (B, N, D)
    return x.transpose(1, 2), mask, log_sample_prior
