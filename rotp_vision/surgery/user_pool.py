"""A pooling of the user's own in the place of a network's global pool."""

from typing import Literal

from torch import Tensor, nn

from rotp_vision.layers import ROTPool


class UserPool(nn.Module):
    """Any pooling module with the axes that its place in a network has; implements timm's pool protocol.

    Args:
        pool: takes maps (B, C, H, W), or tokens (B, N, C), and returns (B, C) or (B, C, 1, 1).
        layout: of what the network gives: 'NCHW' or 'NHWC' maps, or 'NLC' tokens.
        flatten: whether the network wants (B, C), not the axes of its map.
    """

    def __init__(self, pool: nn.Module, layout: Literal['NCHW', 'NHWC', 'NLC'], flatten: bool):
        super().__init__()
        self.pool = pool
        self.layout = layout
        self.flatten = flatten
        self.pool_type = 'user'

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The pooled map or tokens; `mask` (B, N) is handed on where there is one."""
        if self.layout == 'NHWC':
            x = x.permute(0, 3, 1, 2)
        pooled = (self.pool(x) if mask is None else self.pool(x, mask)).flatten(1)
        if self.flatten or self.layout == 'NLC':
            return pooled
        return pooled[:, None, None, :] if self.layout == 'NHWC' else pooled[:, :, None, None]

    def feat_mult(self) -> int:
        """Ratio of output to input channels (timm's pool protocol)."""
        return 1

    def is_identity(self) -> bool:
        """Whether this pool does nothing (timm's pool protocol)."""
        return False

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        if not any(key.startswith(prefix) for key in state_dict):
            state_dict.update({prefix + key: value for key, value in self.state_dict().items()})
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


# What `convert` puts into a network.
NewPool = ROTPool | UserPool
