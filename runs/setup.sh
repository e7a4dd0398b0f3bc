# Sourced by the other scripts here: goes to the repository's root, finds Python, makes .venv, installs what is missing.
# bash 3.2 is enough (macOS), and nothing here is peculiar to GNU.
#
#   WHEELS=DIR   install from the wheel files in DIR, without a network. To fill DIR on a machine that has one:
#                python3 -m pip download -d DIR -r requirements-test.txt -r requirements-viewers.txt
#   PYTHON=...   the interpreter to make .venv with

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$PWD/.venv

# Threads that wait for each other spin by default, which on a machine that has other work to do takes the time from the
# very thread that is waited for: with two threads on two busy cores, training was eight times slower. The results are
# the same, bit for bit. (GNU's OpenMP only, the one in torch for Linux; it reads this when torch is loaded.)
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-1000}"

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    for candidate in "${PYTHON:-python3}" python3 python3.13 python3.12 python3.11 python3.14 python; do
        if is_new_enough "$candidate"; then echo "$candidate"; return; fi
    done
    echo "No Python >= 3.11 was found (tried python3, python3.11 to python3.14, python)." >&2
    echo "Install one, or name it:  PYTHON=/path/to/python3 bash $0" >&2
    exit 2
}

# Its Python is there from the first moment on, pip only in the end: a call that was interrupted leaves none.
has_pip() { "$1" -c 'from importlib.metadata import version; version("pip")' >/dev/null 2>&1; }

make_venv() {
    # Also notices when the Python behind it was removed.
    if is_new_enough "$venv/bin/python" && has_pip "$venv/bin/python"; then return; fi
    python=$(find_python)
    echo "--- making .venv with $("$python" --version)"
    rm -rf "$venv"
    if ! "$python" -m venv "$venv"; then
        rm -rf "$venv"
        echo "$python cannot make a virtual environment. On Debian and Ubuntu: apt install python3-venv" >&2
        exit 2
    fi
}

# The stamp of a requirements file: its content and that of the files it includes, and the Python that it is for.
stamp_of() {
    cat requirements*.txt | "$venv/bin/python" -c '
import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read() + sys.version.encode()).hexdigest())'
}

pip_install() {
    if [ -n "${WHEELS:-}" ]; then
        "$venv/bin/python" -m pip install --disable-pip-version-check --no-index --find-links "$WHEELS" "$@"
    else
        "$venv/bin/python" -m pip install --disable-pip-version-check "$@"
    fi
}

# install FILE            what must be there: when it cannot be had, everything ends here
# install FILE optional   what may be missing
# Each is done once, and again when a requirements file changes. The stamp is set behind it.
install() {
    if [ "$(cat "$venv/installed-$1" 2>/dev/null)" = "$(stamp_of)" ]; then return; fi
    echo "--- installing $1 into .venv (once)"
    if ! pip_install -r "$1"; then
        if [ "${2:-}" != optional ]; then
            echo "The installation did not finish. Mend what pip says above, then give the same command again." >&2
            exit 2
        fi
        echo "note: not all of $1 could be installed; everything runs without. To try again: rm .venv/installed-$1"
    fi
    stamp_of > "$venv/installed-$1"
}

make_venv
