"""How many of the models of timm and torchvision can be converted, counted by converting them.

    python -m benchmarks.coverage                     # all, on the meta device; writes benchmarks/COVERAGE.md
    python -m benchmarks.coverage --filter 'resnet*' --limit 20
    python -m benchmarks.coverage --groups            # the smallest model of each group, for real, forward and backward

Both append their results to a file of JSON lines (`--results`) and resume from it.
"""

import argparse
import collections
import contextlib
import copy
import fnmatch
import json
import pickle
import re
import warnings
from pathlib import Path

import timm
import torch
import torchvision
from torch import nn
from tqdm import tqdm

import rotp_vision
from benchmarks.tables import to_markdown
from rotp_vision.layers import PoolOptions
from rotp_vision.surgery.classes import native_class
from rotp_vision.surgery.convert import replace_pools
from rotp_vision.surgery.find import example_inputs

HERE = Path(__file__).parent

# The number of models that pool, by an independent count.
EXPECTED = {
    'timm': {'module': 838, 'method': 48 + 210},
    'torchvision': {'module': 51, 'method': 13},
}
# Larger models are not run for real.
MOST_PARAMETERS = 200_000_000
WORDS = {'module': 'a module', 'method': 'a method that takes the mean of a map or of tokens'}
METHODS = {'global': 'mean of a map in a method', 'tokens': 'mean of tokens in a method'}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--filter', default='*', help='pattern of model names; torchvision names start with tv:')
    parser.add_argument('--limit', type=int, default=None, help='at most so many models')
    parser.add_argument('--groups', action='store_true', help='run the smallest model of each group for real')
    parser.add_argument('--results', type=Path, default=HERE / 'coverage.jsonl', help='JSON lines of what was found')
    parser.add_argument('--table', type=Path, default=HERE / 'COVERAGE.md', help='the table that is written')
    args = parser.parse_args()
    warnings.filterwarnings('ignore')

    names = [
        *timm.list_models(exclude_filters='*rotp*'),
        *(f'tv:{name}' for name in torchvision.models.list_models(torchvision.models)),
    ]
    counted = _continue(args.results, fnmatch.filter(names, args.filter)[: args.limit], count_one, 'converting')
    runs, too_large = None, []
    if args.groups:
        smallest: dict[str, dict] = {}
        for result in counted:
            if 'group' in result:
                best = smallest.setdefault(result['group'], result)
                smallest[result['group']] = min(best, result, key=lambda one: one['parameters'])
        chosen = sorted(one['name'] for one in smallest.values() if one['parameters'] <= MOST_PARAMETERS)
        too_large = sorted(one['name'] for one in smallest.values() if one['parameters'] > MOST_PARAMETERS)
        runs = _continue(args.results.with_name(f'groups_{args.results.name}'), chosen, run_one, 'running')
    table = markdown(counted, runs, too_large)
    print(table)
    if args.filter == '*' and args.limit is None:
        args.table.write_text(table, encoding='utf-8')


def _continue(path: Path, names: list[str], work, what: str) -> list[dict]:
    known = [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()] if path.exists() else []
    results = {result['name']: result for result in known}
    with path.open('a', encoding='utf-8') as file:
        for name in tqdm([name for name in names if name not in results], desc=what):
            results[name] = {'name': name, **work(name)}
            file.write(json.dumps(results[name]) + '\n')
            file.flush()
    return [results[name] for name in names]


def build(name: str, device: str) -> nn.Module:
    with torch.device(device):
        if name.startswith('tv:'):
            # Random weights are wanted: GoogLeNet and Inception warn about their slow initialisation.
            quick = {'init_weights': False} if name in ('tv:googlenet', 'tv:inception_v3') else {}
            return torchvision.models.get_model(name[3:], **quick)
        return timm.create_model(name)


def count_one(name: str) -> dict:
    """The pattern of a model that converts on the meta device, or the reason why it does not."""
    try:
        model = build(name, 'meta').eval()
    except NotImplementedError:  # it reads values while it is built
        model = build(name, 'cpu').eval().to('meta')
    inputs = example_inputs(model)
    result: dict = {'parameters': sum(parameter.numel() for parameter in model.parameters())}
    try:
        pools = rotp_vision.find_pools(model)
        result['local'] = dict(collections.Counter(pool.old for pool in pools if pool.kind == 'local'))
        result['local_replaceable'] = sum(pool.kind == 'local' and not pool.reason for pool in pools)
        replace_pools(model, pools, PoolOptions(), 'global')
        with torch.no_grad():
            ran = run_of_pools(model, lambda: model(*inputs))
        output = ran.pop('output')
        assert all(count == 1 for count in ran.values()), ran
        classes = getattr(model, 'num_classes', 1000) or output.shape[-1]  # none: the pooled features
        assert output.shape == (inputs[0].shape[0], classes), output.shape
    except Exception as error:
        # The reason in short: what stands before it says where, what stands behind it says what to do.
        reason = str(error).split('): ', 1)[-1]
        return result | {'pattern': re.split('[:;]', reason)[0], 'reason': str(error)[:500]}
    pool = next(pool for pool in pools if pool.kind != 'local')
    by = 'module' if pool.host is None else 'method'
    pattern = f'`{pool.path}`, {pool.layout}, {pool.output}' if by == 'module' else METHODS[pool.kind]
    where = pool.old.split(' in ')[-1] if pool.host else ''
    group = f'{native_class(model).__name__}, {pool.path}, {pool.layout}, {where}'
    return result | {'pattern': pattern, 'by': by, 'group': group}


def run_of_pools(model: nn.Module, run) -> dict:
    """How often each ROT pool ran, and the output."""
    counts = dict.fromkeys(rotp_vision.rot_pools(model), 0)
    with contextlib.ExitStack() as stack:
        for path, pool in rotp_vision.rot_pools(model).items():

            def count(*_, path=path):
                counts[path] += 1

            stack.callback(pool.register_forward_hook(count).remove)
        output = run()
    return {**counts, 'output': output}


def small_example(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of 128 × 128 if the model takes them, else of its own size, and its output."""
    size = example_inputs(model)[0].shape
    for shape in ((*size[:2], 128, 128), size):
        x = torch.randn(shape)
        with contextlib.suppress(Exception), torch.no_grad():
            return x, model(x)
    raise ValueError(f'the model does not run on images of its own size {tuple(size)}')


def run_one(name: str) -> dict:
    """Everything that a converted model must survive, for real."""
    torch.manual_seed(0)
    model = build(name, 'cpu').eval()
    with torch.no_grad():
        for parameter in model.parameters():  # a classifier that starts at zero would hide everything before it
            if not parameter.any():
                parameter.normal_(0, 0.1)
    x, native = small_example(model)
    try:
        rotp_vision.convert(model, example_input=x)
        pools = rotp_vision.rot_pools(model)
        output = model(x)
        assert output.shape == native.shape
        difference = float((output - native).detach().norm() / native.norm())
        output.square().mean().backward()
        for pool in pools.values():
            for parameter_name, parameter in pool.named_parameters():
                assert parameter.grad is not None, parameter_name
                assert parameter.grad.isfinite().all(), parameter_name
            pool.set_weights(smoothness=3.0)
        model.zero_grad()
        with torch.no_grad():
            trained = model(x)
            for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert torch.equal(copied(x), trained)
            if hasattr(model, 'reset_classifier'):
                model.reset_classifier(7)
                assert model(x).shape == (len(x), 7)
                assert list(rotp_vision.rot_pools(model)) == list(pools)
                assert all(rotp_vision.rot_pools(model)[path] is pool for path, pool in pools.items())
    except Exception as error:
        return {'passed': False, 'reason': f'{type(error).__name__}: {error}'[:500]}
    return {'passed': True, 'difference': difference}


def markdown(counted: list[dict], runs: list[dict] | None, too_large: list[str]) -> str:
    rows = []
    for library, expected in EXPECTED.items():
        own = [result for result in counted if result['name'].startswith('tv:') == (library == 'torchvision')]
        for by, number in expected.items():
            converted = sum(result.get('by') == by for result in own)
            rows.append({'library': library, 'what pools': WORDS[by], 'models': number, 'converted': converted})
    total, known = (sum(row[key] for row in rows) for key in ('converted', 'models'))
    rows.append({'library': '', 'what pools': '**all that pool**', 'models': f'**{known}**'})
    rows[-1]['converted'] = f'**{total}** ({total / known:.1%})'
    local = [result for result in counted if result.get('local_replaceable')]
    pools = sum(result['local_replaceable'] for result in local)
    parts = [
        '# Models that can be converted\n',
        f'timm {timm.__version__}, torchvision {torchvision.__version__}; `python -m benchmarks.coverage --groups`\n',
        to_markdown(rows),
        _by_pattern('converted', [result for result in counted if 'by' in result]),
        _by_pattern('not converted', [result for result in counted if 'by' not in result]),
        f'Local pools: {pools} in {len(local)} models.',
    ]
    if runs is not None:
        failed = [run for run in runs if not run['passed']]
        parts.append(
            '\nGroups (class, path, layout), the smallest model of each run for real, forward, backward, deepcopy, '
            f'pickle, `reset_classifier(7)`: {len(runs) - len(failed)} of {len(runs)} passed.'
        )
        parts += [f'- {run["name"]}: {run["reason"]}' for run in failed]
        parts += [f'Not run because even the smallest is large: {", ".join(too_large)}.'] if too_large else []
    return '\n'.join(parts) + '\n'


def _by_pattern(title: str, results: list[dict]) -> str:
    patterns: dict[str, list[str]] = collections.defaultdict(list)
    for result in results:
        patterns[result['pattern']].append(result['name'])
    rows = []
    for pattern, names in sorted(patterns.items(), key=lambda entry: -len(entry[1])):
        of_torchvision = sum(name.startswith('tv:') for name in names)
        counts = {'timm': len(names) - of_torchvision, 'torchvision': of_torchvision}
        rows.append({title: pattern} | counts | {'such as': min(names, key=len).removeprefix('tv:')})
    return to_markdown(rows) if rows else ''


if __name__ == '__main__':
    main()
