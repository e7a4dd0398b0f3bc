#!/usr/bin/env bash
# The tests. Sets up .venv by itself.
#
#   bash runs/test.sh                         the fast ones
#   bash runs/test.sh --all                   with the soaks, mutation suites and large fuzzing
#   bash runs/test.sh tests/test_files.py -x  other words go to pytest
#
# Tests on real archives and vocabularies read them from the folder TEARDOWN_TEST_DATA, or are skipped.
set -eu
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
install requirements-test.txt
exec "$venv/bin/python" -m pytest -q ${1+"$@"}
