"""Plan-sized working memory of the explicit solvers: a batch in chunks that stay in the cache, features contiguous."""

import math
from collections.abc import Iterator
from typing import NamedTuple
from weakref import finalize

import torch
from torch import Tensor

# Elements of one plan-sized buffer. On CPU, and there for each thread, a chunk's handful of buffers should stay in the
# cache; elsewhere the limit only bounds the memory that backward needs besides what was saved.
CHUNK_ELEMENTS = {'cpu': 2**17}
CHUNK_ELEMENTS_ELSEWHERE = 2**25
WIDE = 256  # so many features are worth being transposed set by set


def reads_values(device: torch.device) -> bool:
    """Whether operators may look at values on a device, as they do where chunks are made for its cache.

    On a GPU a look would wait for all kernels before it. A test runs what a GPU would run by taking the CPU out of
    `CHUNK_ELEMENTS`.
    """
    return device.type in CHUNK_ELEMENTS


class Scratch:
    """Buffers (b, D, N) whose feature axis is contiguous; what nobody holds any more is used again.

    That layout makes both log-sum-exps cheap: one over samples adds contiguous vectors, one over features reads along
    memory. Memory that is used again is in the cache, and the system need not find and clear its pages.
    """

    def __init__(self, like: Tensor, num_sets: int, dtype: torch.dtype) -> None:
        self.like = like  # (B, D, N): device, D and N
        self.dtype = dtype
        self._num_sets = self._current = num_sets
        self._idle: list[Tensor] = []
        self._stack: tuple[Tensor, tuple[Tensor, ...]] | None = None
        # An exponential so far below the largest, 1e-13 in float32, counts as zero: no sum notices, while on CPU one
        # that underflows by itself takes a hundred times longer than others, and a product with it ten times.
        self.floor: float | None = -exponent_limit(dtype) / 2 if reads_values(like.device) else None
        # What exponents are multiplied with: on some CPUs torch's powers of two take a third of the time of its
        # exponentials. Coefficients and vectors are multiplied, which costs next to nothing.
        self.unit = math.log2(math.e) if reads_values(like.device) else 1.0

    def start(self, num_sets: int) -> None:
        """From now on buffers hold `num_sets` sets, at most what the first did."""
        if num_sets != self._current:
            self._current, self._stack = num_sets, None

    def take(self, *, samples_last: bool = False) -> Tensor:
        """A (b, D, N) buffer with anything in it, for `out=`. It is free again once it is dropped, views or not."""
        memory = self._idle.pop() if self._idle else self._empty(self._num_sets)
        part = memory[: self._current]
        buffer = part.view(part.shape[0], part.shape[2], part.shape[1]) if samples_last else part.mT
        finalize(buffer, self._idle.append, memory)
        return buffer

    def stack(self, count: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(count, b·N·D), and the same memory as `count` buffers (b, D, N): there is one stack."""
        if self._stack is None:
            whole = self._empty(count, self._current)
            self._stack = whole.view(count, -1), whole.mT.unbind()
        return self._stack

    def _empty(self, *shape: int) -> Tensor:
        """(*shape, N, D)."""
        return self.like.new_empty((*shape, self.like.shape[2], self.like.shape[1]), dtype=self.dtype)

    def load(self, values: Tensor) -> Tensor:
        """`values` (b, D, N) in the dtype and layout of the buffers; itself, not a copy, where it is so already."""
        if values.dtype == self.dtype and values.mT.is_contiguous():
            return values
        return self.take().copy_(values)


class ChunkSize(NamedTuple):
    """What decides how large the chunks of a solver are on CPU, besides the cache."""

    enlarge: int = 1  # how many times larger they may be, for a solver with many small operations
    parts: int = 1  # in how many a batch is cut at least, unless it is small: its buffers then need no more than itself
    multiplies: bool = False  # whether most of the work is products of matrices, a set of which is a thread's work


def chunks(x: Tensor, chunk_size: ChunkSize, dtype: torch.dtype) -> Iterator[tuple[slice, Scratch]]:
    """Which sets are in each chunk of the batch `x` (B, D, N), with scratch memory of a dtype ready for it."""
    limit, workers = CHUNK_ELEMENTS.get(x.device.type, CHUNK_ELEMENTS_ELSEWHERE), _workers(x.device)
    elements = x.shape[1] * x.shape[2]
    if reads_values(x.device):
        largest = limit * chunk_size.enlarge * workers
        if chunk_size.multiplies:
            largest = max(largest, workers * elements)
        limit = min(largest, max(x.numel() // chunk_size.parts, limit // 2))
    size = _even_size(x.shape[0], max(1, limit // elements), workers)
    scratch = Scratch(x, size, dtype)
    for start in range(0, x.shape[0], size or 1):
        sets = slice(start, min(start + size, x.shape[0]))
        scratch.start(sets.stop - sets.start)
        yield sets, scratch


def _workers(device: torch.device) -> int:
    return torch.get_num_threads() if reads_values(device) else 1


def _even_size(total: int, most: int, workers: int) -> int:
    """How many of `total` sets a chunk holds: at most `most`, about as many in each, and a multiple of `workers`.

    torch gives each set of a batched product to one thread: of 5 sets two threads would do 3 and 2, and one would wait.
    """
    if total <= most:
        return total
    unit = workers if workers <= most else 1
    count = math.ceil(total / (most // unit * unit))
    return math.ceil(total / count / unit) * unit


class Exponents(NamedTuple):
    """What is known of exponents before they are made."""

    summable: bool  # whether sums of their exponentials are within bounds even without taking off a maximum
    may_underflow: bool  # whether single exponentials may underflow; if they are summable, no sum is below exp(floor)


def exponentials(
    y: Tensor, dim: int, scratch: Scratch, exponents: Exponents, masked: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """exp((y - top) / unit) over y, zero where `masked`, their sum along `dim`, kept, and the maximum `top`.

    Where the exponentials are summable there is no maximum. Where not, y may be -inf.
    """
    top = None
    if not exponents.summable:
        top = y.amax(dim, keepdim=True)
        y.sub_(top)
    if scratch.floor is not None and exponents.may_underflow:
        floor = 2 * scratch.floor if top is None else scratch.floor
        torch.threshold_(y.clamp_(min=floor * scratch.unit).exp2_(), 1.001 * math.exp(floor), 0.0)
    else:
        (y.exp_ if scratch.unit == 1.0 else y.exp2_)()
    if masked is not None and exponents.summable:
        y.masked_fill_(masked, 0.0)
    return y, y.sum(dim, keepdim=True), top


def extremes(values: Tensor) -> tuple[float, float]:
    """The smallest and the largest of the values (b, D, N), on CPU.

    Read along memory they are in the cache afterwards, from where `Scratch.load` transposes them in half the time.
    """
    low, high = torch.stack((values.mT if values.mT.is_contiguous() else values).aminmax()).tolist()
    return low, high


def balance_rows(logits_grad: Tensor, d_features: Tensor, grad: Tensor) -> None:
    """Take off what the rows of the logits' gradient of a pooling, (b, D, N), fail to add up to zero by.

    That is rounding, of features far from zero and of samples that have all but the whole weight, and not small beside
    what is left of such a gradient. `d_features` are the weights of the pooling times `grad` (b, D, 1), the gradient of
    its result.
    """
    excess = logits_grad.sum(2, keepdim=True)
    logits_grad.addcmul_(d_features, excess / grad.masked_fill(grad == 0, 1.0), value=-1)


def store(values: Tensor, out: Tensor) -> None:
    """Copy `values` (b, D, N) with contiguous features to `out`, whatever its layout and dtype."""
    if values.shape[1] >= WIDE and out.dtype == values.dtype and out.is_contiguous() and values.mT.is_contiguous():
        # torch transposes block by block only what has two axes, which takes a quarter of the time.
        for of_set, target in zip(values.unbind(), out.unbind(), strict=True):
            target.copy_(of_set)
    else:
        out.copy_(values)


def exponent_limit(dtype: torch.dtype) -> float:
    """How far apart exponents may lie that are not shifted by their maximum.

    Two thirds of the way to underflow: what then still vanishes beside the largest term is below rounding.
    """
    return -0.67 * math.log(torch.finfo(dtype).tiny)
