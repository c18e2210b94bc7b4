"""The model card of a saved model."""

import html
import re
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from torch import nn

from rotp_vision.hub.load import HUB, native_of
from rotp_vision.hub.networks import is_own
from rotp_vision.layers import ROTPool
from rotp_vision.surgery.pools import described_pools

TASK = 'image-classification'
TEMPLATE = """---
{{ card_data }}
---

# {{ network }} with ROT pooling

The network `{{ base }}` with regularized optimal transport pooling. It needs the package rotp_vision: without
it timm knows no such model ("Unknown model").

```bash
pip install rotp_vision
```

```python
{{ code }}
```

## Pooling
{% for pool in pools %}
`{{ pool.path }}` is `{{ pool.kind }}`{{ pool.solver }}; options: {{ pool.options }}.

| weight | value |
| --- | --- |
{% for name, value in pool.weights %}| {{ name }} | {{ value }} |
{% endfor %}{% endfor %}{% if metrics %}
## Scores

| metric | value |
| --- | --- |
{% for name, value in metrics %}| {{ name }} | {{ value }} |
{% endfor %}{% endif %}
## Licence

{{ terms }}
"""


def model_card(
    model: nn.Module, directory: Path, place: str, metrics: Mapping[str, Any] | None, license: str | None
) -> str:
    """The README.md of a saved model: what it is, how to load it, its pooling, its scores and the licence.

    Args:
        model: the model.
        directory: where its config.json is.
        place: the argument with which `load_pretrained` will load it.
        metrics, license: as `save_pretrained` takes them.
    """
    base, _ = native_of(directory)
    cfg = getattr(model, 'pretrained_cfg', None) or {}
    network = base.rpartition(':')[2]
    tag = cfg.get('tag')
    scores = {name: value for name, value in (metrics or {}).items() if isinstance(value, Real)}
    results = [EvalResult(TASK, 'unknown', 'unknown', str(name), float(value)) for name, value in scores.items()]
    data = ModelCardData(
        license=license,
        library_name='rotp_vision',
        tags=[TASK, 'timm', 'rotp_vision', *([tag] if tag else [])],
        pipeline_tag=TASK,
        base_model=cfg.get('hf_hub_id'),
        model_name=network,
        eval_results=results or None,
    )
    card = ModelCard.from_template(
        data,
        template_str=TEMPLATE,
        network=_text(f'{network}.{tag}' if tag else network),
        base=_code(base),
        code=_how_to_load(base, place),
        pools=[_pooling(path, pool) for path, pool in described_pools(model).items()],
        metrics=[(_text(name), _text(value)) for name, value in (metrics or {}).items()],
        terms=_terms(license, cfg, base),
    )
    return str(card)


def shortened(value: torch.Tensor, limit: int = 8) -> str:
    """The numbers of a weight as text, the first few if there are many."""
    values = value.flatten().tolist()
    return ', '.join(f'{v:.4g}' for v in values[:limit]) + (f', … ({len(values)})' if len(values) > limit else '')


def _how_to_load(base: str, place: str) -> str:
    if is_own(base):
        network = base.rpartition(':')[2]
        return f'import rotp_vision\n\nmodel = rotp_vision.load_pretrained({place!r}, base={network})  # {base}'
    source = place if place.startswith(HUB) else f'local-dir:{place}'
    return (
        f'import timm, rotp_vision\n\nmodel = rotp_vision.load_pretrained({place!r})\n'
        f'model = timm.create_model({source!r}, pretrained=True)  # the same'
    )


def _pooling(path: str, pool: Any) -> dict[str, Any]:
    options = ', '.join(f'{name} = {_text(value)}' for name, value in pool.options.to_dict().items())
    return {
        'path': _code(path),
        'kind': type(pool).__name__,
        'solver': f', {_text(pool.options.solver)}' if isinstance(pool, ROTPool) else '',
        'options': options or 'the recommended',
        'weights': [(name, shortened(value)) for name, value in pool.named_weights().items()],
    }


def _terms(license: str | None, cfg: Mapping[str, Any], base: str) -> str:
    origin = cfg.get('hf_hub_id') or cfg.get('origin_url') or cfg.get('url') or base
    if license:
        return f'These weights: {_text(license)}.'
    if cfg.get('license'):
        return (
            f'timm records the licence {_text(cfg["license"])} for the weights of {_text(origin)}; it holds if these '
            'began there.'
        )
    return 'No licence of the weights is recorded.'


def _text(value: Any) -> str:
    """A value as one line of Markdown that holds no markup and no HTML."""
    line = html.escape(' '.join(str(value).split()), quote=False)
    return re.sub(r'([\\`*_\[\]|#~])', r'\\\1', line)


def _code(value: Any) -> str:
    """A value for a code span, in which backticks are the only markup."""
    return ' '.join(str(value).split()).replace('`', "'")
