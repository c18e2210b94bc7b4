import itertools
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def most_memory(function: Callable[[], object]) -> int:
    """Most bytes that a function has at a time beyond what there was before it, as torch itself counts on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    changes = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == '[memory]']
    return max(itertools.accumulate(changes))
