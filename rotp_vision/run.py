"""Run somebody else's script with the ROTP models registered: `python -m rotp_vision.run train.py …`.

A timm model exists once the module that registers it was imported; scripts that do not import rotp_vision, such as
timm's own train.py and validate.py, learn of it this way. Also by torchrun: `torchrun … -m rotp_vision.run train.py …`.
"""

import os
import runpy
import sys

import rotp_vision  # noqa: F401  (registers the models)


def main():
    if len(sys.argv) < 2:
        raise SystemExit('usage: python -m rotp_vision.run SCRIPT [ARGUMENTS …]')
    sys.argv = sys.argv[1:]
    if not os.path.exists(sys.argv[0]):
        raise SystemExit(f'python -m rotp_vision.run: there is no script {sys.argv[0]}')
    # As `python SCRIPT` does, so that a script finds the modules beside it.
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name='__main__')


if __name__ == '__main__':
    main()
