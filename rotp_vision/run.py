"""Run a script with the ROTP models registered in timm: `python -m rotp_vision.run SCRIPT …`.

Scripts that do not import rotp_vision, such as timm's train.py and validate.py, can use the models this way. It also
works with torchrun: `torchrun … -m rotp_vision.run train.py …`.
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
    # Like `python SCRIPT`, so that the script can import modules beside it.
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name='__main__')


if __name__ == '__main__':
    main()
