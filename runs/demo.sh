#!/usr/bin/env bash
# The whole chain by one command: a web archive in, a chat model out. Needs Python >= 3.11 and nothing else.
#
#   bash runs/demo.sh                               config/demo.py: two cores, no GPU, no network but for installing
#   bash runs/demo.sh config/smoke.py               the same stages, as small as they can be
#   bash runs/demo.sh config/demo.py --seed=2 --data_dir=data/two --out_dir=out/two
#   WHEELS=DIR bash runs/demo.sh                    installs from wheel files, see runs/setup.sh
#
# Interrupt it when you like: the same command continues, and comes to the same end. What is done is not done again.
set -eu
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
install requirements.txt
install requirements-viewers.txt optional
exec "$venv/bin/python" runs/chain.py ${1+"$@"}
