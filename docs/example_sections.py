"""Lets the API pages show `Example:` in a docstring as code, which Google's style spells `Examples:`."""

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r'^Example:$', 'Examples:', obj.docstring.value, flags=re.MULTILINE)
